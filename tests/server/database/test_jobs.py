"""What clients do with jobs, on both databases."""

from __future__ import annotations

import pytest
from support.service.jobs import FAST, PROBLEM, SLOW, found, start, submit

from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe_server.database import Database, InitialResult, Jobs, NewJob, Searches
from optpipe_server.database.jobs import options_of
from optpipe_server.database.refusals import MissingError


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
