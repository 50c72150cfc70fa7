"""What clients do with jobs, and which of those that are over are deleted, on both databases."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update
from support.problems.chain import chain
from support.service import running, settings_in
from support.service.work import FAST, PROBLEM, SLOW, found, row, start, submit
from support.until import until

from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe_cache import Retention
from optpipe_cache.storage import KEEP_ALL
from optpipe_server.database import Database, InitialResult, Jobs, NewJob, Searches, tables
from optpipe_server.database.changes import MissingError
from optpipe_server.database.jobs import options_of, prune
from optpipe_server.database.searches import MOST_LOSSES


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database)


def test_a_job_is_what_was_submitted(jobs: Jobs) -> None:
    options = SolveOptions(method="cpsat", objective="span", time_limit_s=30.0, threads=3, solver="pulp:CBC")
    problem = PROBLEM.replace(name="a\0b")  # PostgreSQL has no NUL
    job_id, new = jobs.add(NewJob(problem, options, 3), start(), most_open=1)
    job = jobs.job(job_id)
    assert new
    assert (job.state, job.problem_name, job.problem_sha256) == ("queued", "a\ufffdb", PROBLEM.sha256)
    assert (options_of(job), job.priority) == (options, 3)
    assert [line.text for line in jobs.log(job_id, 0, 9)] == [
        "submitted: cpsat, span, 30 s, threads = 3, solver = pulp:CBC"
    ]
    assert (job.status, job.lower_bound_ms, job.last_seq) == ("feasible", 1.0, 1)
    assert job.gap == pytest.approx(1 - 1.0 / SLOW.makespan_ms)
    assert Problem.from_json(jobs.problem(job)) == problem
    [first] = jobs.incumbents(job_id)
    assert (first.source, first.method, first.makespan_ms) == ("heuristic", "naive", SLOW.makespan_ms)
    whole = jobs.incumbent(job_id, 1)
    assert whole is not None
    assert (whole.problem_sha256, whole.attempt) == (PROBLEM.sha256, 0)
    assert jobs.incumbent(job_id, 2) is None


def test_a_job_proven_at_submission_is_over(jobs: Jobs) -> None:
    best, _ = jobs.add(NewJob(PROBLEM), InitialResult(found(FAST, FAST.makespan_ms), "cache"), most_open=0)
    none, _ = jobs.add(NewJob(PROBLEM), InitialResult(Result("infeasible", reason="device 0 needs\0more")), most_open=0)
    done, infeasible = jobs.job(best), jobs.job(none)
    assert (done.state, done.status, done.gap, done.ended_at is not None) == ("done", "optimal", 0.0, True)
    assert (infeasible.state, infeasible.reason, infeasible.last_seq) == ("infeasible", "device 0 needs\ufffdmore", 0)
    proven = InitialResult(found(FAST, FAST.makespan_ms))
    milp, _ = jobs.add(NewJob(PROBLEM, SolveOptions(method="milp")), proven, most_open=1)
    assert jobs.job(milp).state == "queued"  # it runs whatever is known


def test_the_problem_of_a_job_that_was_deleted_meanwhile_is_missing(jobs: Jobs, database: Database) -> None:
    job = jobs.job(submit(database))
    jobs.purge(job.id)
    with pytest.raises(MissingError):
        jobs.problem(job)


def test_lines_of_the_log_can_be_stored(jobs: Jobs, database: Database) -> None:
    job_id = submit(database)
    claim = Searches(database, "w").begin(job_id)
    assert claim is not None
    Searches(database, "w").note(claim, "what\0is this \ud800" + "x" * 10**6, "warning")
    lines = jobs.log(job_id, 0, 100)
    assert [line.text[:12] for line in lines] == ["submitted: a", "taken by w", "what\ufffdis this"]
    assert len(lines[2].text) == 2000


def ended(database: Database) -> str:
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
        assert set(db.execute(select(tables.jobs.c.id)).scalars()) == {over[2], over[3], waiting}
        assert db.execute(select(func.count()).select_from(tables.incumbents)).scalar_one() == 3, "one of each job"
    assert prune(database, Retention(0)) == 2


@pytest.mark.parametrize("kept", [Retention(0), Retention(days=7), KEEP_ALL], ids=["none", "days", "all"])
def test_a_service_deletes_what_it_does_not_keep(tmp_path: Path, kept: Retention) -> None:
    settings = replace(settings_in(tmp_path), kept=kept)
    with closing(Database(settings.database)) as database:
        ended(database)
        with database.write() as db:
            db.execute(update(tables.jobs).values(ended_at=(datetime.now(UTC) - timedelta(days=8)).isoformat()))
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
