"""Concurrent calls, on both databases: nothing is done twice, no limit is exceeded, nothing deadlocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from support.problems.chain import chain, gpipe, one_by_one
from support.service.work import PROBLEM, found, start, submit

from optpipe_server.database import Database, InitialResult, Jobs, NewJob, Searches
from optpipe_server.database.changes import ConflictError, StaleError, TooManyOpenError
from optpipe_server.database.jobs import options_of
from optpipe_server.database.searches import Claim, LostError

SLOWER = chain(scale=2.0)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Call each in a thread of its own at the same time; return what they return or raise."""
    ready, answers = threading.Barrier(len(calls)), [None] * len(calls)

    def run(k: int) -> None:
        ready.wait(60)
        try:
            answers[k] = calls[k]()  # type: ignore[call-overload]
        except Exception as error:
            answers[k] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


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
    def add(name: str) -> object:
        return Jobs(database).add(NewJob(PROBLEM, key_name=name), start(), most_open=10)

    answers = at_once(*(partial(add, name) for name in ["a", "b"] * 12))
    assert sum(isinstance(answer, TooManyOpenError) for answer in answers) == 4
    assert sum(isinstance(answer, tuple) for answer in answers) == 20
    names = [job.key_name for job in Jobs(database).page(None, None, 99)]
    assert sorted(names) == ["a"] * 10 + ["b"] * 10


def test_one_idempotency_key_makes_one_job(database: Database) -> None:
    def add() -> object:
        return Jobs(database).add(NewJob(PROBLEM, idempotency_key="k", body_sha256="x"), start(), most_open=10)

    answers = at_once(*[add] * 12)
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
