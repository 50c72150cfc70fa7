"""How tenants share the workers: the one rule by which `Leases.claim` takes a job and the queue tells what comes first.

A free worker takes a job of the tenant with the fewest running jobs; among these, of the one whose last turn is longest
ago. Priorities order the jobs of one tenant. So whoever has submitted many long jobs has all workers only while nobody
else has a job that waits.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, Select, case, func, insert, select, text, update

from optpipe_server.database.tables import OPEN, jobs, turns

_LOCK = text("select pg_advisory_xact_lock(hashtextextended('optpipe: turns', 0))")


class Standing(NamedTuple):
    """A tenant with open jobs. In the order of these fields tenants get their turns."""

    running: int
    last_turn: int  # number of its last claim among those of all tenants; 0 if there was none
    first_number: int  # of its oldest waiting job
    waiting: int
    tenant: str


_OF_TENANTS = (
    select(
        func.sum(case((jobs.c.state == "running", 1), else_=0)),
        func.coalesce(func.max(turns.c.number), 0),
        func.coalesce(func.min(case((jobs.c.state == "queued", jobs.c.number))), 0),
        func.sum(case((jobs.c.state == "queued", 1), else_=0)),
        jobs.c.tenant,
    )
    .select_from(jobs.outerjoin(turns, turns.c.tenant == jobs.c.tenant))
    .where(jobs.c.state.in_(OPEN))
    .group_by(jobs.c.tenant)
)


def standings(db: Connection) -> list[Standing]:
    """Return the tenants with open jobs; those with waiting ones are in the order of their turns."""
    return sorted(Standing(*row) for row in db.execute(_OF_TENANTS))


def first_waiting(tenant: str) -> Select[tuple[int]]:
    """Select the tenant's waiting job of the highest priority, among these the oldest."""
    of_tenant = select(jobs).where(jobs.c.tenant == tenant, jobs.c.state == "queued")
    return of_tenant.order_by(jobs.c.priority.desc(), jobs.c.number).limit(1)


def jobs_ahead(tenant: str, all_standings: list[Standing]) -> int:
    """Count the waiting jobs of others that have their turn before the tenant's next job, as things stand."""
    theirs = next((standing for standing in all_standings if standing.tenant == tenant and standing.waiting), None)
    if theirs is None:
        return 0
    return sum(min(other.waiting, _turns_before(other, theirs)) for other in all_standings if other is not theirs)


def _turns_before(other: Standing, tenant: Standing) -> int:
    """How often another tenant has its turn before this one. Each turn adds a running job and makes its last turn the
    latest, so with as many running jobs it comes first only once."""
    return max(tenant.running - other.running, int(other < tenant))


def lock_turns(db: Connection) -> None:
    """Let only one worker at a time see who has which turn: two could otherwise both give theirs to one tenant."""
    if db.dialect.name != "sqlite":  # which has one writer at a time anyway
        db.execute(_LOCK)


def record_turn(db: Connection, tenant: str) -> None:
    """Record that the tenant had its turn now; the caller holds `lock_turns`. Deleted jobs do not undo it."""
    number = select(func.coalesce(func.max(turns.c.number), 0) + 1).scalar_subquery()
    if not db.execute(update(turns).where(turns.c.tenant == tenant).values(number=number)).rowcount:
        db.execute(insert(turns).values(tenant=tenant, number=number))
