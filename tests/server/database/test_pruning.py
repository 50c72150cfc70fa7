"""Jobs that are over are deleted where they are not kept, on both databases."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update
from support.problems.chain import chain
from support.service import running, settings_in
from support.service.jobs import FAST, SLOW, found, row, submit
from support.until import until

from optpipe_cache import Retention
from optpipe_cache.storage import KEEP_ALL
from optpipe_server.database import Database, InitialResult, Jobs, Searches
from optpipe_server.database.jobs import prune
from optpipe_server.database.searches import MOST_LOSSES
from optpipe_server.database.tables import incumbents, jobs


def ended(database: Database) -> str:
    """Return the id of a job that is done."""
    job_id, searches = submit(database), Searches(database, "w")
    claim = searches.begin(job_id)
    assert claim is not None
    assert searches.finish(claim, "done", found(FAST), 1.0)
    return job_id


def test_the_jobs_that_ended_last_are_kept(database: Database) -> None:
    over = [ended(database) for _ in range(4)]
    waiting = submit(database)
    assert prune(database, Retention(4)) == 0
    assert prune(database, Retention(2)) == 2
    with database.read() as db:
        assert set(db.execute(select(jobs.c.id)).scalars()) == {over[2], over[3], waiting}
        assert db.execute(select(func.count()).select_from(incumbents)).scalar_one() == 3, "one of each job"
    assert prune(database, Retention(0)) == 2


@pytest.mark.parametrize("kept", [Retention(0), Retention(days=7), KEEP_ALL], ids=["none", "days", "all"])
def test_a_service_deletes_what_it_does_not_keep(tmp_path: Path, kept: Retention) -> None:
    settings = replace(settings_in(tmp_path), kept=kept)
    with closing(Database(settings.database)) as database:
        ended(database)
        with database.write() as db:
            db.execute(update(jobs).values(ended_at=(datetime.now(UTC) - timedelta(days=8)).isoformat()))
    with running(settings) as (_, server):
        until(lambda: sum(server.service.jobs.count().values()) == int(kept is KEEP_ALL))


def test_a_job_that_goes_on_meanwhile_is_not_deleted(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, write = ended(database), database.write

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
    for number in range(MOST_LOSSES + 1):
        assert Searches(database, f"w{number}").begin(job_id) is not None
    assert Searches(database, "one more").begin(job_id) is None
    ended = row(database, job_id)
    assert (ended.state, ended.reason) == (state, f"its worker was lost {MOST_LOSSES + 1} times")
