"""What any process may do to the database at any time: free the jobs of lost workers, delete what is not kept."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, func, or_, select, tuple_, update

from optpipe_cache import Retention
from optpipe_server.database.engine import Database, clock_s
from optpipe_server.database.incumbents import add_log_line, end_values, update_job
from optpipe_server.database.refusals import CANCELLED
from optpipe_server.database.tables import State, jobs, schedules

WITH_SCHEDULE = ("feasible", "optimal")  # the status of a job that has a schedule
LONGEST_S = 60.0  # of any lease
PRUNED_AT_ONCE = 100  # jobs
MOST_LOSSES = 5  # of workers, after which a job goes on; one that crashes its worker each time has to end


def reap(database: Database, everything: bool = False, but: Collection[str] = ()) -> list[str]:
    """Let the jobs of lost workers wait again, or end them with what they have; return their ids.

    Any process may call it at any time, for all jobs `but` those that it works on itself. With `everything`, every
    running job is abandoned, whatever its lease: for the one process of a SQLite file that has just started.
    """
    reaped = []
    running = jobs.c.state == "running"
    with database.write() as db:
        # A lease that is longer than any can be: the database's clock was set back. A lost worker would keep the job
        # until the clock has caught up.
        db.execute(
            update(jobs)
            .where(running, jobs.c.lease_until > clock_s() + LONGEST_S)
            .values(lease_until=clock_s() + LONGEST_S)
        )
        abandoned = running if everything else running & (jobs.c.lease_until < clock_s())
        for job in db.execute(
            select(jobs).where(abandoned, jobs.c.id.not_in(but)).with_for_update(skip_locked=True)
        ).all():
            reaped.append(job.id)
            add_log_line(db, job.id, job.attempt, f"its worker {job.worker} is gone", "warning")
            losses = job.losses + 1
            if job.cancel_requested:
                values = end_values("cancelled", CANCELLED)
            elif losses <= MOST_LOSSES:
                values = {"state": "queued", "worker": None, "lease_until": None}
            else:
                state: State = "done" if job.status in WITH_SCHEDULE else "failed"
                values = end_values(state, f"its worker was lost {losses} times")
                add_log_line(db, job.id, job.attempt, values["reason"], "error")
            update_job(db, job, losses=losses, **values)
    return reaped


def prune(database: Database, kept: Retention) -> int:
    """Delete jobs that are over and not kept; return how many were deleted, at most so many at once."""
    last = func.row_number().over(order_by=(jobs.c.ended_at.desc(), jobs.c.number.desc()))
    over = select(jobs.c.number, jobs.c.ended_at, last.label("place")).where(jobs.c.ended_at.is_not(None)).subquery()
    not_kept = or_(over.c.place > kept.most, over.c.ended_at < kept.since)
    with database.read() as db:
        old = db.execute(select(over.c.number, over.c.ended_at).where(not_kept).limit(PRUNED_AT_ONCE)).all()
    if not old:
        return 0
    with database.write() as db:  # not those that go on or have ended again meanwhile
        unchanged = tuple_(jobs.c.number, jobs.c.ended_at).in_([tuple(row) for row in old])
        return db.execute(delete(jobs).where(unchanged)).rowcount


def prune_schedules(database: Database, kept: Retention) -> int:
    """Delete the cached schedules that were not used for so many days; return how many were deleted."""
    old = schedules.c.used < kept.since
    with database.read() as db:
        if db.execute(select(schedules.c.problem_sha256).where(old).limit(1)).first() is None:
            return 0
    with database.write() as db:
        return db.execute(delete(schedules).where(old)).rowcount
