"""Metrics of workers; tests/deploy has those of the running service."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import update
from support.service.databases import on_sqlite
from support.service.work import Work, until

import optpipe_server.work.rounds
from optpipe_server.database import Leases, reap
from optpipe_server.database.tables import jobs
from optpipe_server.metrics import REGISTRY
from optpipe_server.work import Reaper


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"optpipe_{name}", labels) or 0.0


def test_lost_and_reaped_jobs_are_counted(work: Work) -> None:
    lost, reaped = counted("lost_leases_total"), counted("reaped_jobs_total")
    held = work.submit("hang")
    with work.supervisor():
        work.found(held)
        with work.database.write() as db:  # as another worker's claim, after this one's lease
            db.execute(update(jobs).where(jobs.c.id == held).values(worker="another", attempt=jobs.c.attempt + 1))
        until(lambda: counted("lost_leases_total") == lost + 1)
    reaper = Reaper(work.database, every_s=0.05)
    with work.database.write() as db:
        db.execute(update(jobs).where(jobs.c.id == held).values(lease_until=0.0))
    reaper.start()
    until(lambda: counted("reaped_jobs_total") == reaped + 1)
    reaper.stop()


@on_sqlite
def test_a_reaper_survives_errors(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its thread no job of a lost worker would go on."""
    failures = [ValueError("unheard of")]

    def in_the_end(*asked: Any) -> list[str]:
        if failures:
            raise failures.pop()
        return reap(*asked)

    reaper = Reaper(work.database, every_s=0.05)
    reaper.start()
    monkeypatch.setattr(optpipe_server.work.rounds, "reap", in_the_end)
    until(lambda: not failures)
    lost = work.submit("hang")
    assert Leases(work.database, "lost", 0.1).claim() is not None
    until(lambda: work.job(lost).state == "queued")
    reaper.stop()


@on_sqlite
def test_a_machine_that_slept_goes_on(work: Work) -> None:
    """All leases have expired by then, and a process must not take its own jobs as abandoned."""
    held = work.submit("hang")
    with work.supervisor(heartbeat_s=60.0) as supervisor:
        work.found(held)
        with work.database.write() as db:
            db.execute(update(jobs).where(jobs.c.id == held).values(lease_until=0.0))
        reaper = Reaper(work.database, supervisor.held, 0.01)
        reaper.start()
        until(lambda: supervisor.held() == [held])
        time.sleep(0.5)
        reaper.stop()
        assert (work.job(held).state, work.job(held).attempt, work.job(held).losses) == ("running", 1, 0)
