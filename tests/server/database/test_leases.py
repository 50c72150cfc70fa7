"""What workers do with jobs, on both databases: leases, fences, and jobs of lost workers."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update
from support.problems.chain import chain, gpipe
from support.service import running, settings_in
from support.service.jobs import FAST, SLOW, expire, found, row, submit

from optpipe_cache import Cache, Retention
from optpipe_cache.storage import KEEP_ALL
from optpipe_server.database import Database, InitialResult, Jobs, Leases, prune, reap
from optpipe_server.database.cache_storage import TableStorage
from optpipe_server.database.engine import clock_s
from optpipe_server.database.leases import Claim
from optpipe_server.database.tables import incumbents, jobs, schedules
from optpipe_server.database.upkeep import LONGEST_S, MOST_LOSSES


def claimed(database: Database, worker: str = "w") -> tuple[Leases, Claim]:
    leases = Leases(database, worker)
    claim = leases.claim()
    assert claim is not None
    return leases, claim


def test_leases_count_by_the_clock_of_the_database(database: Database) -> None:
    with database.read() as db:
        assert abs(db.execute(select(clock_s())).scalar_one() - time.time()) < 60, "seconds since 1970"
    job_id = submit(database)
    leases = Leases(database, "w", lease_s=1e-6)
    claim = leases.claim()
    assert claim is not None
    with database.read() as db:  # whose clock may tick in milliseconds
        until = row(database, job_id).lease_until
        while db.execute(select(clock_s())).scalar_one() <= until:
            time.sleep(0.001)
    assert reap(database) == [job_id]
    _, claim = claimed(database)
    assert reap(database) == [], "a lease that has not ended"
    expire(database, job_id)
    assert Leases(database, "w").renew([(claim, 2.5)]) == set(), "late, but nobody has taken it"
    assert (reap(database), row(database, job_id).spent_s) == ([], 2.5)


def test_a_clock_that_was_set_back_does_not_block_jobs(database: Database) -> None:
    job_id = submit(database)
    claimed(database)
    with database.write() as db:
        db.execute(update(jobs).where(jobs.c.id == job_id).values(lease_until=clock_s() + 3600.0))
    assert reap(database) == [], "its worker may live, and renews it"
    with database.read() as db:
        left_s = db.execute(select(jobs.c.lease_until - clock_s()).where(jobs.c.id == job_id)).scalar_one()
    assert 0 < left_s <= LONGEST_S
    expire(database, job_id)
    assert reap(database) == [job_id]


def test_the_jobs_that_ended_last_are_kept(database: Database) -> None:
    over = [submit(database) for _ in range(4)]
    leases = Leases(database, "w")
    for _ in over:
        claim = leases.claim()
        assert claim is not None
        leases.finish(claim, "done", found(FAST), 1.0)
    waiting = submit(database)
    assert prune(database, Retention(4)) == 0
    assert prune(database, Retention(2)) == 2
    with database.read() as db:
        assert set(db.execute(select(jobs.c.id)).scalars()) == {over[2], over[3], waiting}
        assert db.execute(select(func.count()).select_from(incumbents)).scalar_one() == 3, "one of each job"
    assert prune(database, Retention(0)) == 2


@pytest.mark.parametrize("kept", [Retention(0), Retention(days=7), KEEP_ALL], ids=["none", "days", "all"])
def test_a_service_deletes_what_it_does_not_keep(tmp_path: Path, kept: Retention) -> None:
    """On SQLite also when it starts."""
    settings = replace(settings_in(tmp_path), kept=kept)
    with closing(Database(settings.database)) as database:
        submit(database)
        leases, claim = claimed(database)
        leases.finish(claim, "done", found(FAST), 1.0)
        Cache(TableStorage(database)).add(gpipe(chain()), "feasible")
        before = (datetime.now(UTC) - timedelta(days=8)).isoformat()
        with database.write() as db:
            db.execute(update(jobs).values(ended_at=before))
            db.execute(update(schedules).values(used=before))
    with running(settings):
        pass
    with closing(Database(settings.database)) as database, database.read() as db:
        left = [db.execute(select(func.count()).select_from(table)).scalar_one() for table in (jobs, schedules)]
    assert left == [1 if kept is KEEP_ALL else 0, 0 if kept.days else 1]


def test_a_job_that_goes_on_meanwhile_is_not_deleted(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(database)
    leases, claim = claimed(database)
    leases.finish(claim, "done", found(FAST), 1.0)
    write = database.write

    def after_another_problem() -> AbstractContextManager[Connection]:
        monkeypatch.setattr(database, "write", write)
        Jobs(database).change_problem(job_id, chain(scale=2.0), InitialResult(), seen=1, most_open=9)
        return write()

    monkeypatch.setattr(database, "write", after_another_problem)
    assert prune(database, Retention(0)) == 0
    assert row(database, job_id).state == "queued"


@pytest.mark.parametrize(("schedule", "state"), [(SLOW, "done"), (None, "failed")])
def test_a_job_whose_workers_are_lost_again_and_again_ends(database: Database, schedule: object, state: str) -> None:
    job_id = submit(database, schedule=schedule)
    for _ in range(MOST_LOSSES + 1):
        assert row(database, job_id).state == "queued"
        claimed(database)
        expire(database, job_id)
        reap(database)
    ended = row(database, job_id)
    assert (ended.state, ended.reason) == (state, f"its worker was lost {MOST_LOSSES + 1} times")
