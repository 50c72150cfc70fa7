"""Jobs against a plain Python model, on both databases: clients and workers act in any order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
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
from support.service.work import found, row

from optpipe import Problem, Result, Schedule
from optpipe.options import SolveOptions
from optpipe_server.database import Database, InitialResult, Jobs, NewJob, Searches
from optpipe_server.database.changes import CANCELLED, ConflictError, KeyReusedError, StaleError, TooManyOpenError
from optpipe_server.database.jobs import options_of
from optpipe_server.database.searches import MOST_CRASHES, MOST_LOSSES, Claim, LostError
from optpipe_server.database.tables import OPEN

MOST_OPEN = 3
NAMES = ("a", "b")
PROBLEMS = [chain(scale=scale) for scale in (1.0, 1.5, 2.0)]
SCHEDULES = {problem.sha256: [one_by_one(problem), gpipe(problem)] for problem in PROBLEMS}
WORKERS = st.sampled_from(["v", "w"])
COLUMNS = (
    *("key_name", "idempotency_key", "problem_version", "lower_bound_ms", "value_ms", "version", "state", "reason"),
    *("status", "attempt", "worker", "crashes", "losses", "spent_s"),
)
BOUNDS = st.sampled_from([0.25, 0.5, 1.0])
STARTS = st.none() | st.tuples(st.integers(0, 1), BOUNDS)


@dataclass
class Known:
    """A job as it should be."""

    key_name: str
    problem: Problem
    priority: int
    time_limit_s: float
    state: str = "queued"
    idempotency_key: str | None = None
    reason: str | None = None
    problem_version: int = 1
    cancel: bool = False
    incumbents: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, length
    status: str = "unknown"
    lower_bound_ms: float | None = None
    bounds: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, bound
    attempt: int = 0
    worker: str | None = None
    spent_s: float = 0.0
    crashes: int = 0
    losses: int = 0
    adopted: dict[int, int] = field(default_factory=dict)
    version: int = 1

    @property
    def value_ms(self) -> float | None:
        version, length = self.incumbents[-1] if self.incumbents else (0, None)
        return length if version == self.problem_version else None

    def learn(self, result: Result) -> None:
        self.status = result.status
        if result.lower_bound_ms is not None:
            self.learn_bound(result.lower_bound_ms)

    def learn_bound(self, bound_ms: float) -> None:
        if self.lower_bound_ms is None or bound_ms > self.lower_bound_ms:
            self.lower_bound_ms = bound_ms
            self.bounds.append((self.problem_version, bound_ms))

    def add(self, result: Result) -> None:
        if self.value_ms is None or result.makespan_ms < self.value_ms:
            self.incumbents.append((self.problem_version, result.makespan_ms))
            self.learn(result)
            self.version += 1

    def end(self, state: str, reason: str | None) -> None:
        self.state, self.reason, self.worker = state, reason, None
        self.version += 1

    def is_as(self, job: Any, incumbents: Sequence[Any], bounds: Sequence[Any]) -> None:
        """The rows say the same."""
        for name in COLUMNS:
            assert getattr(job, name) == getattr(self, name), name
        assert (job.problem_sha256, options_of(job).time_limit_s) == (self.problem.sha256, self.time_limit_s)
        assert (job.ended_at is None) == (self.state in OPEN)
        assert [(each.problem_version, each.makespan_ms) for each in incumbents] == self.incumbents
        assert [(each.problem_version, each.lower_bound_ms) for each in bounds] == self.bounds
        assert [each.seq for each in incumbents] == [*range(1, job.last_seq + 1)]
        assert {each.seq: each.step for each in incumbents if each.step is not None} == self.adopted


def result_of(schedule: Schedule, bound: float) -> Result:
    return found(schedule, bound * schedule.makespan_ms)


class Model(RuleBasedStateMachine):
    """Each rule acts on the service's database and on the model, and compares the two."""

    opening: Callable[[], AbstractContextManager[str]]  # of a database with nothing in it

    ids: Bundle[str] = Bundle("ids")
    claims: Bundle[Claim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self._url = type(self).opening()
        self.database = Database(self._url.__enter__())
        self.jobs = Jobs(self.database)
        self.workers = {name: Searches(self.database, name) for name in ("v", "w")}
        self.known: dict[str, Known] = {}  # those submitted first are first
        self.first_problem: dict[str, str] = {}  # by the job, what its key came with

    def teardown(self) -> None:
        self.database.close()
        self._url.__exit__(None, None, None)

    def holds(self, claim: Claim) -> Known | None:
        job = self.known.get(claim.job_id)
        return job if job and job.state == "running" and job.attempt == claim.attempt else None

    def write(self, claim: Claim, worker: str, call: Callable[[Searches], Any]) -> tuple[Known | None, Any]:
        """What a worker's write returns, and the job; None for the job if the worker has lost it."""
        job = self.holds(claim)
        try:
            answer = call(self.workers[worker])
        except LostError:
            assert job is None
            return None, None
        assert job is not None
        return job, answer

    @rule(target=claims, worker=WORKERS, left=st.booleans())
    def take_first(self, worker: str, left: bool) -> object:
        """As the worker of a service that is one process: also what a former process has left."""
        running = [job_id for job_id, job in self.known.items() if job.state == "running"]
        job_id = self.workers[worker].first_open([] if left else running)
        waits = {each: job for each, job in self.known.items() if job.state == "queued" or (left and each in running)}
        assert job_id == min(waits, key=lambda each: -waits[each].priority, default=None)
        return self.take(worker, job_id) if job_id else multiple()

    @rule(target=claims, worker=WORKERS, job_id=ids)
    def take(self, worker: str, job_id: str) -> object:
        """A job that waits, or that of a worker that seems lost."""
        claim, job = self.workers[worker].begin(job_id), self.known[job_id]
        if job.state == "running":  # its worker is gone, as another one finds
            job.losses += 1
            if job.cancel:
                job.end("cancelled", CANCELLED)
            elif job.losses > MOST_LOSSES:
                job.end("done" if job.value_ms is not None else "failed", f"its worker was lost {job.losses} times")
            else:
                job.version += 1
        if job.state not in OPEN:
            assert claim is None
            return multiple()
        assert claim is not None
        job.state, job.worker, job.attempt = "running", worker, job.attempt + 1
        job.version += 1
        assert (claim.problem, claim.options.time_limit_s) == (job.problem, job.time_limit_s)
        for name in ("attempt", "problem_version", "spent_s", "lower_bound_ms"):
            assert getattr(claim, name) == getattr(job, name)
        assert (claim.best is None) == (not job.incumbents)
        assert claim.best_version == (job.incumbents[-1][0] if job.incumbents else 0)
        if claim.best is not None and job.value_ms is not None:
            assert claim.best.makespan_ms == job.value_ms
        return claim

    @rule(claim=claims, worker=WORKERS, spent=st.floats(0, 9))
    def look(self, claim: Claim, worker: str, spent: float) -> None:
        job = self.holds(claim)
        requests = self.workers[worker].cancel_requests([claim])
        self.workers[worker].store_spent(claim, spent)
        assert requests == ({claim.job_id: job.cancel} if job else {})
        if job:
            job.spent_s = spent

    @rule(claim=claims, worker=WORKERS, which=st.integers(0, 1), bound=BOUNDS)
    def append(self, claim: Claim, worker: str, which: int, bound: float) -> None:
        result = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, _ = self.write(claim, worker, lambda searches: searches.append(claim, result))
        if job:
            job.add(result)

    @rule(claim=claims, worker=WORKERS, bound=BOUNDS)
    def raise_bound(self, claim: Claim, worker: str, bound: float) -> None:
        bound_ms = bound * min(schedule.makespan_ms for schedule in SCHEDULES[claim.problem.sha256])
        job, _ = self.write(claim, worker, lambda searches: searches.raise_bound(claim, bound_ms))
        if job and (job.lower_bound_ms is None or bound_ms > job.lower_bound_ms):
            job.learn_bound(bound_ms)
            job.version += 1

    @rule(claim=claims, worker=WORKERS)
    def note(self, claim: Claim, worker: str) -> None:
        self.write(claim, worker, lambda searches: searches.note(claim, "still here"))

    @rule(claim=claims, worker=WORKERS, spent=st.floats(0, 9), crash=st.sampled_from([None, "signal 9"]))
    def give_back(self, claim: Claim, worker: str, spent: float, crash: str | None) -> None:
        job, again = self.write(claim, worker, lambda searches: searches.give_back(claim, spent, crash))
        if job is None:
            return
        job.crashes += bool(crash)
        assert again == (not crash or job.crashes <= MOST_CRASHES)
        if again and job.cancel:
            job.end("cancelled", CANCELLED)
            return
        job.spent_s = spent
        if again:
            job.end("queued", job.reason)
        else:
            job.version += 1

    @rule(
        claim=claims,
        worker=WORKERS,
        state=st.sampled_from(["done", "failed", "infeasible", "cancelled"]),
        which=st.integers(0, 1) | st.none(),
        bound=BOUNDS,
        spent=st.floats(0, 9),
    )
    def finish(self, claim: Claim, worker: str, state: str, which: int | None, bound: float, spent: float) -> None:
        told = Result("infeasible" if state == "infeasible" else "unknown", reason="because")
        if which is not None:
            told = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, ended = self.write(claim, worker, lambda searches: searches.finish(claim, state, told, spent))  # type: ignore[arg-type]
        if job is None:
            return
        more_time = job.time_limit_s > claim.options.time_limit_s
        matters = state in ("done", "failed") and told.status != "optimal" and not job.cancel
        assert ended == (not (more_time and matters))
        job.spent_s = spent
        reason = job.reason if job.cancel and state == "cancelled" else told.reason
        if not ended:
            job.end("queued", job.reason)
        elif job.value_ms is None:
            job.end(state, reason)
            job.learn(replace(told, schedule=None, status="infeasible" if state == "infeasible" else "unknown"))
        else:
            job.end("cancelled" if state == "cancelled" else "done", reason)
            if told.makespan_ms is not None and told.makespan_ms <= job.value_ms:
                job.learn(told)

    def is_full(self, name: str) -> bool:
        return sum(job.key_name == name and job.state in OPEN for job in self.known.values()) >= MOST_OPEN

    def start(self, problem: Problem, given: tuple[int, float] | None) -> InitialResult:
        return InitialResult(result_of(SCHEDULES[problem.sha256][given[0]], given[1])) if given else InitialResult()

    @rule(
        target=ids,
        name=st.sampled_from(NAMES),
        problem=st.sampled_from(PROBLEMS),
        given=STARTS,
        priority=st.integers(0, 1),
        key=st.sampled_from([None, None, "k", "l"]),
    )
    def submit(
        self, name: str, problem: Problem, given: tuple[int, float] | None, priority: int, key: str | None
    ) -> object:
        start = self.start(problem, given)
        asked = NewJob(problem, SolveOptions(time_limit_s=10.0), priority, name, key, problem.sha256)
        first_state = start.state(asked.options)
        there = next((job_id for job_id, job in self.known.items() if key and job.idempotency_key == key), None)
        try:
            job_id, new = self.jobs.add(asked, start, most_open=MOST_OPEN)
        except TooManyOpenError:
            assert there is None
            assert first_state == "queued"
            assert self.is_full(name)
            return multiple()
        except KeyReusedError:
            assert there is not None
            assert self.first_problem[there] != problem.sha256
            return multiple()
        if not new:
            assert (there, self.first_problem[job_id]) == (job_id, problem.sha256)
            return multiple()
        assert there is None
        assert first_state != "queued" or not self.is_full(name)
        job = Known(name, problem, priority, 10.0, first_state, key)
        job.learn(start.best)
        if start.best.schedule is not None:
            job.add(start.best)
        job.version = 1  # with its first schedule
        self.known[job_id] = job
        self.first_problem[job_id] = problem.sha256
        return job_id

    @rule(job_id=ids)
    def cancel(self, job_id: str) -> None:
        job = self.known[job_id]
        self.jobs.cancel(job_id)
        if job.state == "queued":
            job.cancel = True
            job.end("cancelled", CANCELLED)
        elif job.state == "running" and not job.cancel:
            job.cancel, job.reason = True, CANCELLED
            job.version += 1

    @rule(job_id=ids, more=st.floats(-1, 5), stale=st.booleans())
    def extend(self, job_id: str, more: float, stale: bool) -> None:
        job = self.known[job_id]
        version = row(self.database, job_id).version
        wanted = job.time_limit_s + more
        try:
            self.jobs.extend(job_id, wanted, version - stale)
        except StaleError:
            assert stale
        except ConflictError:
            assert job.state not in OPEN or wanted <= job.time_limit_s
        else:
            assert not stale
            assert job.state in OPEN
            assert wanted > job.time_limit_s
            job.time_limit_s = wanted
            job.version += 1

    @rule(job_id=ids, problem=st.sampled_from(PROBLEMS), given=STARTS, stale=st.booleans())
    def change_problem(self, job_id: str, problem: Problem, given: tuple[int, float] | None, stale: bool) -> None:
        job = self.known[job_id]
        start = self.start(problem, given)
        first_state = start.state(SolveOptions())
        seen = len(job.incumbents) - stale
        try:
            self.jobs.change_problem(job_id, problem, start, seen=seen, most_open=MOST_OPEN)
        except ConflictError:
            assert job.state == "cancelled" or (job.cancel and job.state in OPEN)
            return
        except StaleError:
            assert stale
            return
        except TooManyOpenError:
            assert first_state == "queued"
            assert job.state not in OPEN
            assert self.is_full(job.key_name)
            return
        assert not stale
        assert job.state != "cancelled"
        assert not (job.cancel and job.state in OPEN)
        job.cancel = False
        assert first_state != "queued" or job.state in OPEN or not self.is_full(job.key_name)
        job.state, job.worker = first_state, None
        job.problem, job.problem_version, job.reason, job.lower_bound_ms = problem, job.problem_version + 1, None, None
        job.spent_s, job.crashes, job.losses = 0.0, 0, 0
        job.learn(start.best)
        job.version += 1
        if start.best.schedule is not None:
            job.add(start.best)

    @rule(job_id=ids, seq=st.integers(0, 3), step=st.integers(0, 10**12))
    def adopt(self, job_id: str, seq: int, step: int) -> None:
        job = self.known[job_id]
        try:
            self.jobs.adopt(job_id, seq, step, None)
        except LookupError:
            assert not 1 <= seq <= len(job.incumbents)
            return
        assert 1 <= seq <= len(job.incumbents)
        job.adopted[seq] = step
        job.version += 1

    @rule(job_id=consumes(ids))
    def purge(self, job_id: str) -> None:
        del self.known[job_id]
        self.jobs.purge(job_id)
        assert (self.jobs.incumbents(job_id), self.jobs.bounds(job_id), self.jobs.log(job_id, 0, 9)) == ([], [], [])
        for call in (self.jobs.cancel, self.jobs.purge):
            with pytest.raises(LookupError):
                call(job_id)

    @invariant()
    def the_database_says_the_same(self) -> None:
        there = {job.id: job for job in self.jobs.page(None, None, 200)}
        assert [*there] == [*self.known][::-1]
        for job_id, job in there.items():
            self.known[job_id].is_as(job, self.jobs.incumbents(job_id), self.jobs.bounds(job_id))


def soaked(database: str) -> Any:
    return pytest.param(database, 1000, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("database", "examples"), [("sqlite", 20), ("postgresql", 10), soaked("sqlite"), soaked("postgresql")]
)
def test_jobs(database: str, examples: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    @contextmanager
    def opening() -> Iterator[str]:
        if database == "sqlite":
            with TemporaryDirectory(dir=tmp_path) as folder:
                yield f"sqlite:///{folder}/jobs.sqlite"
        else:
            with request.getfixturevalue("postgres").migrated() as url:
                yield url

    machine = type("Machine", (Model,), {"opening": staticmethod(opening)})
    few = settings(max_examples=examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(machine, settings=few)
