"""What clients do with jobs, and at once: nothing is done twice, no limit is exceeded, nothing deadlocks."""

import random
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.service import running, settings_in
from support.service.work import FAST, PROBLEM, SLOW, at_once, found, row, start, submit

from optpipe import Problem, Result
from optpipe.options import SolveOptions
from optpipe_cache import Retention
from optpipe_cache.storage import KEEP_ALL
from optpipe_server.database import Database, InitialResult, Jobs, NewJob, Searches, engine, tables
from optpipe_server.database.changes import ConflictError, MissingError, StaleError, TooManyOpenError
from optpipe_server.database.jobs import options_of, prune
from optpipe_server.database.searches import MOST_LOSSES, Claim, LostError


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
    Searches(database, "w").note(claim, "what\0is this \ud800" + "x" * 10**6, "warning")
    lines = jobs.log(job_id, 0, 100)
    assert [line.text[:12] for line in lines] == ["submitted: a", "taken by w", "what\ufffdis this"]
    assert len(lines[2].text) == 2000


def test_only_jobs_whose_lease_is_over_end_and_with_their_reason(jobs: Jobs, database: Database) -> None:
    def leased(lease_s: float | None) -> str:
        return jobs.add(NewJob(PROBLEM, lease_s=lease_s), start(), most_open=9)[0]

    waiting, searched, unleased, long, renewed = map(leased, (60, 60, None, 3600, 60))
    claims = [Searches(database, "w").begin(job_id) for job_id in (searched, unleased)]
    with database.write() as db:
        db.execute(update(tables.leases).values(renewed_at=(datetime.now(UTC) - timedelta(seconds=90)).isoformat()))
    jobs.renew(renewed)
    jobs.cancel_gone(engine.now())
    assert jobs.count() == {"queued": 3, "running": 2}, "nothing could be renewed before"
    jobs.cancel_gone("")
    assert {job_id: jobs.job(job_id).cancel_requested for job_id in (unleased, long, renewed)} == {
        unleased: False,
        long: False,
        renewed: False,
    }
    jobs.cancel(searched)  # too late: the reason stays
    for claim in claims:
        Searches(database, "w").finish(claim, "cancelled", Result("unknown", reason="a worker's"), 1.0)
    assert [(job.state, job.reason) for job in map(jobs.job, (waiting, searched, unleased))] == [
        ("cancelled", "its training is gone"),
        ("cancelled", "its training is gone"),
        ("cancelled", "a worker's"),
    ]
    jobs.purge(renewed)
    with database.read() as db:
        assert renewed not in set(db.execute(select(tables.leases.c.job)).scalars())


def test_a_problem_that_is_posed_to_a_job_renews_its_lease(jobs: Jobs, database: Database) -> None:
    """Also to one that was over for longer, whose client renewed nothing meanwhile."""
    job_id, _ = jobs.add(NewJob(PROBLEM, lease_s=60), start(), most_open=9)
    Searches(database, "w").finish(Searches(database, "w").begin(job_id), "done", Result("unknown"), 1.0)
    with database.write() as db:
        db.execute(update(tables.leases).values(renewed_at="2026-01-01T00:00:00.000+00:00"))
    jobs.change_problem(job_id, PROBLEM, start(), seen=jobs.job(job_id).last_seq, most_open=9)
    jobs.cancel_gone("")
    assert jobs.job(job_id).state == "queued"


def ended(database: Database) -> str:
    job_id, searches = submit(database), Searches(database, "w")
    claim = searches.begin(job_id)
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


SLOWER = chain(scale=2.0)


def test_a_job_begun_at_once_is_one_workers(database: Database) -> None:
    job_id = submit(database)
    workers = [Searches(database, f"w{k}") for k in range(5)]
    claims = at_once(*(partial(worker.begin, job_id) for worker in workers))
    assert sorted(claim.attempt for claim in claims if isinstance(claim, Claim)) == [1, 2, 3, 4, 5]
    [last] = (k for k, claim in enumerate(claims) if isinstance(claim, Claim) and claim.attempt == 5)
    for k, claim in enumerate(claims):
        assert isinstance(claim, Claim)
        with suppress(LostError):
            workers[k].note(claim, "it is mine")
            assert k == last


def test_the_limit_of_open_jobs_holds_under_concurrency(database: Database) -> None:
    asked = [NewJob(PROBLEM, key_name=name) for name in ["a", "b"] * 12]
    answers = at_once(*(partial(Jobs(database).add, each, start(), most_open=10) for each in asked))
    assert sum(isinstance(answer, TooManyOpenError) for answer in answers) == 4
    assert sum(isinstance(answer, tuple) for answer in answers) == 20
    names = [job.key_name for job in Jobs(database).page(None, None, 99)]
    assert sorted(names) == ["a"] * 10 + ["b"] * 10


def test_one_idempotency_key_makes_one_job(database: Database) -> None:
    asked = NewJob(PROBLEM, idempotency_key="k", body_sha256="x")
    answers = at_once(*[partial(Jobs(database).add, asked, start(), most_open=10)] * 12)
    [job] = Jobs(database).page(None, None, 99)
    assert sorted(answers) == [(job.id, False)] * 11 + [(job.id, True)]  # type: ignore[type-var]


@pytest.mark.parametrize("rounds", [40, pytest.param(1500, marks=pytest.mark.soak)])
def test_everything_at_once(database: Database, rounds: int) -> None:
    """Clients and workers on a few jobs: only allowed errors occur, and every job stays consistent."""
    jobs = Jobs(database)
    ids = [submit(database, time_limit_s=1.0) for _ in range(3)]
    refused = (ConflictError, StaleError, TooManyOpenError, LostError)

    def client(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(rounds):
            job = jobs.job(chance.choice(ids))
            with suppress(*refused):
                match chance.randrange(4):
                    case 0:
                        posed = chance.choice([PROBLEM, SLOWER])
                        best = chance.choice([InitialResult(), InitialResult(found(one_by_one(posed)), "carried")])
                        jobs.change_problem(job.id, posed, best, seen=job.last_seq, most_open=9)
                    case 1:
                        jobs.extend(job.id, options_of(job).time_limit_s + 1, job.version)
                    case 2:
                        jobs.adopt(job.id, max(1, job.last_seq), chance.randrange(9), None)
                    case 3:
                        jobs.add(NewJob(PROBLEM), start(), most_open=3)

    def worker(seed: int) -> None:
        chance, searches = random.Random(seed), Searches(database, f"w{seed}")
        for _ in range(rounds):
            job_id = searches.first_open([] if chance.random() < 0.2 else ids)
            claim = searches.begin(job_id) if job_id else None
            with suppress(*refused):
                while claim:
                    searches.store_spent(claim, claim.spent_s + 0.1)
                    searches.append(claim, found(chance.choice([gpipe, one_by_one])(claim.problem)))
                    match chance.randrange(4):
                        case 0:
                            searches.give_back(claim, 0.1, "signal 9")
                        case 1:
                            searches.give_back(claim, 0.2)
                        case 2:
                            searches.finish(claim, "done", found(one_by_one(claim.problem)), 0.3)
                        case 3:
                            claim = searches.begin(claim.job_id)

    calls = [partial(each, k) for each in (client, worker) for k in range(3)]
    assert at_once(*calls) == [None] * len(calls)
    for job in jobs.page(None, None, 200):
        known = jobs.incumbents(job.id)
        assert [each.seq for each in known] == [*range(1, job.last_seq + 1)]
        values: dict[int, list[float]] = {}
        for each in known:
            values.setdefault(each.problem_version, []).append(each.makespan_ms)
        assert all(lengths == sorted({*lengths}, reverse=True) for lengths in values.values())
        assert (job.status in ("feasible", "optimal")) == (job.problem_version in values)
        assert (job.worker is not None) == (job.state == "running")
        assert len({line.number for line in jobs.log(job.id, 0, 10**6)}) >= job.attempt
