"""Jobs against a plain Python model, on both databases: clients, workers and reapers act in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from support.problems.chain import chain, gpipe, one_by_one
from support.service.jobs import expire, found, row
from support.service.known_job import Known
from support.service.postgres import Postgres

from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, InitialResult, Jobs, Leases, NewJob, reap
from optpipe_server.database.leases import MOST_CRASHES, Claim, LostError
from optpipe_server.database.refusals import CANCELLED, ConflictError, KeyReusedError, QueueFullError, StaleError
from optpipe_server.database.tables import OPEN

QUEUE = 3
TENANTS = ("a", "b")
PROBLEMS = [chain(scale=scale) for scale in (1.0, 1.5, 2.0)]
SCHEDULES = {problem.sha256: [one_by_one(problem), gpipe(problem)] for problem in PROBLEMS}


def result_of(schedule: Schedule, bound: float) -> Result:
    return found(schedule, bound * schedule.makespan_ms)


bounds = st.sampled_from([0.25, 0.5, 1.0])
starts = st.none() | st.tuples(st.integers(0, 1), bounds)


class Model(RuleBasedStateMachine):
    """Each rule acts on the service's database and on the model, and compares the two."""

    opening: Callable[[], Iterator[str]]  # of a database with nothing in it

    ids: Bundle[str] = Bundle("ids")
    claims: Bundle[Claim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self._url = contextmanager(type(self).opening)()
        self.database = Database(self._url.__enter__())
        self.jobs = Jobs(self.database)
        self.workers = {name: Leases(self.database, name) for name in ("v", "w")}
        self.known: dict[str, Known] = {}
        self.turns: dict[str, int] = {}  # by tenant, the number of its last claim
        self.number = 0
        self.first_problem: dict[str, str] = {}  # by the job, what its key came with

    def teardown(self) -> None:
        self.database.close()
        self._url.__exit__(None, None, None)

    def queued(self, tenant: str) -> int:
        return sum(job.tenant == tenant and job.state == "queued" for job in self.known.values())

    def start(self, problem: Problem, given: tuple[int, float] | None) -> InitialResult:
        return InitialResult(result_of(SCHEDULES[problem.sha256][given[0]], given[1])) if given else InitialResult()

    def holds(self, claim: Claim, worker: str) -> Known | None:
        job = self.known.get(claim.job_id)
        return job if job and job.state == "running" and (job.attempt, job.worker) == (claim.attempt, worker) else None

    def write(self, claim: Claim, worker: str, call: Callable[[Leases], Any]) -> tuple[Known | None, Any]:
        """What a worker's write returns, and the job; None for the job if the worker has lost it."""
        job = self.holds(claim, worker)
        try:
            answer = call(self.workers[worker])
        except LostError:
            assert job is None
            return None, None
        assert job is not None
        return job, answer

    @rule(
        target=ids,
        tenant=st.sampled_from(TENANTS),
        problem=st.sampled_from(PROBLEMS),
        given=starts,
        priority=st.integers(0, 1),
        key=st.sampled_from([None, None, "k", "l"]),
    )
    def submit(
        self, tenant: str, problem: Problem, given: tuple[int, float] | None, priority: int, key: str | None
    ) -> object:
        start = self.start(problem, given)
        asked = NewJob(problem, SolveOptions(time_limit_s=10.0), priority)
        first_state = start.state(asked.options)
        there = next(
            (job_id for job_id, job in self.known.items() if key and (job.tenant, job.key) == (tenant, key)), None
        )
        try:
            job_id, new = self.jobs.add(tenant, asked, start, queue=QUEUE, key=key, body_sha256=problem.sha256)
        except QueueFullError:
            assert there is None
            assert first_state == "queued"
            assert self.queued(tenant) >= QUEUE
            return multiple()
        except KeyReusedError:
            assert there is not None
            assert self.first_problem[there] != problem.sha256
            return multiple()
        if not new:
            assert (there, self.first_problem[job_id]) == (job_id, problem.sha256)
            return multiple()
        assert there is None
        assert first_state != "queued" or self.queued(tenant) < QUEUE
        self.number += 1
        job = Known(tenant, problem, priority, self.number, 10.0, first_state, key)
        job.learn(start.best)
        if start.best.schedule is not None:
            job.add(start.best)
        job.changes = 0  # since it is there
        self.known[job_id] = job
        self.first_problem[job_id] = problem.sha256
        return job_id

    def turn(self, tenant: str) -> tuple[int, int, int]:
        """What orders the turns of tenants: how many jobs run, the last turn, the oldest job that waits."""
        states = [(job.state, job.number) for job in self.known.values() if job.tenant == tenant]
        oldest = min((number for state, number in states if state == "queued"), default=0)
        return sum(state == "running" for state, _ in states), self.turns.get(tenant, 0), oldest

    @rule(target=claims, worker=st.sampled_from(["v", "w"]))
    def claim(self, worker: str) -> object:
        claim = self.workers[worker].claim()
        waiting = [
            (*self.turn(job.tenant), -job.priority, job.number, job_id)
            for job_id, job in self.known.items()
            if job.state == "queued"
        ]
        if claim is None:
            assert not waiting
            return multiple()
        assert claim.job_id == min(waiting)[-1]
        self.turns[claim.tenant] = 1 + max(self.turns.values(), default=0)
        job = self.known[claim.job_id]
        job.state, job.worker, job.attempt = "running", worker, job.attempt + 1
        job.changes += 1
        job.is_that_of(claim)
        return claim

    @rule(claim=claims, worker=st.sampled_from(["v", "w"]), spent=st.floats(0, 9))
    def renew(self, claim: Claim, worker: str, spent: float) -> None:
        job = self.known.get(claim.job_id)
        mine = job is not None and job.state == "running" and job.attempt == claim.attempt
        assert self.workers[worker].renew([(claim, spent)]) == (set() if mine else {claim.job_id})
        orders = self.workers[worker].requested_changes({claim.job_id: claim.attempt})
        assert {*orders} == ({claim.job_id} if mine else set())
        if mine:
            assert job is not None
            told = orders[claim.job_id]
            assert (told.cancelled, told.problem_version) == (job.cancel, job.version)
            job.spent_s = spent if claim.problem_version == job.version else job.spent_s

    @rule(claim=claims, worker=st.sampled_from(["v", "w"]), which=st.integers(0, 1), bound=bounds)
    def append(self, claim: Claim, worker: str, which: int, bound: float) -> None:
        result = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, kept = self.write(claim, worker, lambda leases: leases.append(claim, result))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept:
            job.add(result)

    @rule(claim=claims, worker=st.sampled_from(["v", "w"]), bound=bounds)
    def raise_bound(self, claim: Claim, worker: str, bound: float) -> None:
        told_ms = bound * min(schedule.makespan_ms for schedule in SCHEDULES[claim.problem.sha256])
        job, kept = self.write(claim, worker, lambda leases: leases.raise_bound(claim, told_ms))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept and (job.bound is None or told_ms > job.bound):
            job.learn_bound(told_ms)
            job.changes += 1

    @rule(claim=claims, worker=st.sampled_from(["v", "w"]))
    def note(self, claim: Claim, worker: str) -> None:
        self.write(claim, worker, lambda leases: leases.note(claim, "still here"))

    @rule(target=claims, claim=claims, worker=st.sampled_from(["v", "w"]), spent=st.floats(0, 9))
    def reload(self, claim: Claim, worker: str, spent: float) -> object:
        job, new = self.write(claim, worker, lambda leases: leases.reload(claim, spent))
        if job is None:
            return multiple()
        assert new.spent_s == (spent if claim.problem_version == job.version else job.spent_s)
        job.is_that_of(replace(new, spent_s=job.spent_s))
        return new

    @rule(target=claims, claim=consumes(claims), worker=st.sampled_from(["v", "w"]), spent=st.floats(0, 9))
    def crash(self, claim: Claim, worker: str, spent: float) -> object:
        job, new = self.write(claim, worker, lambda leases: leases.record_crash(claim, "signal 9", spent))
        if job is None:
            return claim
        assert (new is None) == (job.crashes >= MOST_CRASHES)
        job.spent_s = spent if claim.problem_version == job.version else job.spent_s
        job.crashes += 1
        job.changes += 1
        if new is None:
            return claim
        job.attempt += 1
        job.is_that_of(new)
        return new

    @rule(claim=claims, worker=st.sampled_from(["v", "w"]), spent=st.floats(0, 9))
    def give_back(self, claim: Claim, worker: str, spent: float) -> None:
        job, _ = self.write(claim, worker, lambda leases: leases.give_back(claim, spent))
        if job is None:
            return
        if job.cancel:
            job.end("cancelled", CANCELLED)
        else:
            job.spent_s = spent if claim.problem_version == job.version else job.spent_s
            job.wait()

    @rule(
        claim=claims,
        worker=st.sampled_from(["v", "w"]),
        state=st.sampled_from(["done", "failed", "infeasible", "cancelled"]),
        which=st.integers(0, 1) | st.none(),
        bound=bounds,
        spent=st.floats(0, 9),
    )
    def finish(self, claim: Claim, worker: str, state: str, which: int | None, bound: float, spent: float) -> None:
        told = Result("infeasible" if state == "infeasible" else "unknown", reason="because")
        if which is not None:
            told = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, ended = self.write(claim, worker, lambda leases: leases.finish(claim, state, told, spent))  # type: ignore[arg-type]
        if job is None:
            return
        more = (
            job.time_limit_s > claim.options.time_limit_s
            and state in ("done", "failed")
            and told.status != "optimal"
            and not job.cancel
        )
        assert ended == (job.version == claim.problem_version and not more)
        if not ended:
            return
        job.spent_s = spent
        if job.best is None:
            job.end(state, told.reason)
            job.learn(replace(told, schedule=None, status="infeasible" if state == "infeasible" else "unknown"))
        else:
            job.end("cancelled" if state == "cancelled" else "done", told.reason)
            if told.makespan_ms is not None and told.makespan_ms <= job.best:
                job.learn(told)

    @rule(job_id=ids)
    def cancel(self, job_id: str) -> None:
        job = self.known.get(job_id)
        if job is None:
            with pytest.raises(LookupError):
                self.jobs.cancel("a", job_id)
            return
        self.jobs.cancel(job.tenant, job_id)
        if job.state == "queued":
            job.cancel = True
            job.end("cancelled", CANCELLED)
        elif job.state == "running" and not job.cancel:
            job.cancel = True
            job.changes += 1

    @rule(job_id=ids, more=st.floats(-1, 5), stale=st.booleans())
    def extend(self, job_id: str, more: float, stale: bool) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
        version = row(self.database, job_id).version
        wanted = job.time_limit_s + more
        try:
            self.jobs.extend(job.tenant, job_id, wanted, version - stale)
        except StaleError:
            assert stale
        except ConflictError:
            assert job.state not in OPEN or wanted <= job.time_limit_s
        else:
            assert not stale
            assert job.state in OPEN
            assert wanted > job.time_limit_s
            job.time_limit_s = wanted
            job.changes += 1

    @rule(job_id=ids, problem=st.sampled_from(PROBLEMS), given=starts, stale=st.booleans())
    def change_problem(self, job_id: str, problem: Problem, given: tuple[int, float] | None, stale: bool) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
        start = self.start(problem, given)
        first_state = start.state(SolveOptions())
        seen = len(job.incumbents) - stale
        try:
            self.jobs.change_problem(job.tenant, job_id, problem, start, seen=seen, queue=QUEUE)
        except ConflictError:
            assert job.state == "cancelled" or (job.cancel and job.state in OPEN)
            return
        except StaleError:
            assert stale
            return
        except QueueFullError:
            assert first_state == "queued"
            assert job.state not in OPEN
            assert self.queued(job.tenant) >= QUEUE
            return
        assert not stale
        assert job.state != "cancelled"
        assert not (job.cancel and job.state in OPEN)
        job.cancel = False
        assert first_state != "queued" or job.state in OPEN or self.queued(job.tenant) < QUEUE
        job.state = "running" if first_state == "queued" and job.state == "running" else first_state
        job.worker = job.worker if job.state == "running" else None
        job.problem, job.version, job.reason, job.bound = problem, job.version + 1, None, None
        job.spent_s, job.crashes, job.losses = 0.0, 0, 0
        job.learn(start.best)
        job.changes += 1
        if start.best.schedule is not None:
            job.add(start.best)

    @rule(job_id=ids, seq=st.integers(0, 3), step=st.integers(0, 10**12))
    def adopt(self, job_id: str, seq: int, step: int) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
        try:
            self.jobs.adopt(job.tenant, job_id, seq, step, None)
        except LookupError:
            assert not 1 <= seq <= len(job.incumbents)
            return
        assert 1 <= seq <= len(job.incumbents)
        job.adopted[seq] = step
        job.changes += 1

    @rule(job_id=consumes(ids))
    def purge(self, job_id: str) -> None:
        job = self.known.pop(job_id, None)
        if job is None:
            with pytest.raises(LookupError):
                self.jobs.purge("a", job_id)
        else:
            self.jobs.purge(job.tenant, job_id)
            assert (self.jobs.incumbents(job_id), self.jobs.bounds(job_id), self.jobs.log(job_id, 0, 9)) == ([], [], [])

    @rule(claim=claims)
    def worker_is_gone(self, claim: Claim) -> None:
        """Its lease expires, and somebody reaps."""
        job = self.known.get(claim.job_id)
        if job is None or job.state != "running":
            assert reap(self.database) == []
            return
        expire(self.database, claim.job_id)
        assert reap(self.database) == [claim.job_id]
        job.lose()

    @rule()
    def service_begins_anew(self) -> None:
        """With one process on the database, every running job is abandoned."""
        running = {job_id for job_id, job in self.known.items() if job.state == "running"}
        assert {*reap(self.database, everything=True)} == running
        for job_id in running:
            self.known[job_id].lose()

    @invariant()
    def the_database_says_the_same(self) -> None:
        for tenant in TENANTS:
            there = {job.id: job for job in self.jobs.page(tenant, None, None, 200)}
            assert {*there} == {job_id for job_id, job in self.known.items() if job.tenant == tenant}
            assert [*there] == sorted(there, key=lambda job_id: -self.known[job_id].number)
            for job_id, job in there.items():
                self.known[job_id].is_as(job, self.jobs.incumbents(job_id), self.jobs.bounds(job_id))


@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_jobs_on_sqlite(tmp_path: Path, examples: int) -> None:
    def opening() -> Iterator[str]:
        with TemporaryDirectory(dir=tmp_path) as folder:
            yield f"sqlite:///{folder}/jobs.sqlite"

    _run(opening, examples)


@pytest.mark.parametrize("examples", [10, pytest.param(1000, marks=pytest.mark.soak)])
def test_jobs_on_postgresql(postgres: Postgres, examples: int) -> None:
    def opening() -> Iterator[str]:
        with postgres.migrated() as url:
            yield url

    _run(opening, examples)


def _run(opening: Callable[[], Iterator[str]], examples: int) -> None:
    machine = type("Machine", (Model,), {"opening": staticmethod(opening)})
    few = settings(max_examples=examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(machine, settings=few)
