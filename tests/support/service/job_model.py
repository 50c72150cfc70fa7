"""What workers do with jobs, against a plain Python model of a job; the test adds what clients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule

from optpipe.model.problem import Problem
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, Jobs, Searches
from optpipe_server.database.changes import CANCELLED
from optpipe_server.database.jobs import options_of
from optpipe_server.database.searches import MOST_CRASHES, MOST_LOSSES, Claim, LostError
from optpipe_server.database.tables import OPEN
from support.problems.chain import chain, gpipe, one_by_one
from support.service.work import found

PROBLEMS = [chain(scale=scale) for scale in (1.0, 1.5, 2.0)]
SCHEDULES = {problem.sha256: [one_by_one(problem), gpipe(problem)] for problem in PROBLEMS}
WORKERS = st.sampled_from(["v", "w"])
BOUNDS = st.sampled_from([0.25, 0.5, 1.0])


@dataclass
class Known:
    """A job as it should be."""

    key_name: str
    problem: Problem
    priority: int
    number: int
    time_limit_s: float
    state: str = "queued"
    key: str | None = None
    reason: str | None = None
    version: int = 1  # of the problem
    cancel: bool = False
    incumbents: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, length
    status: str = "unknown"
    bound: float | None = None
    bounds: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, bound
    attempt: int = 0
    worker: str | None = None
    spent_s: float = 0.0
    crashes: int = 0
    losses: int = 0
    adopted: dict[int, int] = field(default_factory=dict)
    changes: int = 0

    @property
    def best(self) -> float | None:
        last = self.incumbents[-1:]
        return last[0][1] if last and last[0][0] == self.version else None

    def learn(self, result: Result) -> None:
        self.status = result.status
        if result.lower_bound_ms is not None:
            self.learn_bound(result.lower_bound_ms)

    def learn_bound(self, told: float) -> None:
        if self.bound is None or told > self.bound:
            self.bound = told
            self.bounds.append((self.version, told))

    def add(self, result: Result) -> None:
        assert result.makespan_ms is not None
        if self.best is None or result.makespan_ms < self.best:
            self.incumbents.append((self.version, result.makespan_ms))
            self.learn(result)
            self.changes += 1

    def end(self, state: str, reason: str | None) -> None:
        self.state, self.reason, self.worker = state, reason, None
        self.changes += 1

    def wait(self) -> None:
        self.state, self.worker = "queued", None
        self.changes += 1

    def lose(self) -> None:
        """Its worker is gone, as another one finds."""
        self.losses += 1
        if self.cancel:
            self.end("cancelled", CANCELLED)
        elif self.losses <= MOST_LOSSES:
            self.changes += 1
        else:
            self.end("done" if self.best is not None else "failed", f"its worker was lost {self.losses} times")

    def is_that_of(self, claim: Claim) -> None:
        assert (claim.attempt, claim.problem, claim.problem_version) == (self.attempt, self.problem, self.version)
        limits = claim.options.time_limit_s, claim.spent_s, claim.lower_bound_ms
        assert limits == (self.time_limit_s, self.spent_s, self.bound)
        assert (claim.best is None) == (not self.incumbents)
        assert claim.best_version == (self.incumbents[-1][0] if self.incumbents else 0)
        if claim.best is not None and self.best is not None:
            assert claim.best.makespan_ms == self.best

    def is_as(self, job: Any, incumbents: Sequence[Any], bounds: Sequence[Any]) -> None:
        """The rows say the same."""
        columns = {
            "key_name": self.key_name,
            "idempotency_key": self.key,
            "problem_sha256": self.problem.sha256,
            "problem_version": self.version,
            "lower_bound_ms": self.bound,
            "value_ms": self.best,
            "version": self.changes + 1,
        }
        columns |= {name: getattr(self, name) for name in ("state", "reason", "status", "attempt", "worker")}
        columns |= {name: getattr(self, name) for name in ("crashes", "losses", "spent_s")}
        assert {name: getattr(job, name) for name in columns} == columns
        assert options_of(job).time_limit_s == self.time_limit_s
        assert (job.ended_at is None) == (self.state in OPEN)
        assert [(each.problem_version, each.makespan_ms) for each in incumbents] == self.incumbents
        assert [(each.problem_version, each.lower_bound_ms) for each in bounds] == self.bounds
        assert [each.seq for each in incumbents] == [*range(1, job.last_seq + 1)]
        assert {each.seq: each.step for each in incumbents if each.step is not None} == self.adopted


def result_of(schedule: Schedule, bound: float) -> Result:
    return found(schedule, bound * schedule.makespan_ms)


class WorkerRules(RuleBasedStateMachine):
    """Each rule acts on the service's database and on the model, and compares the two."""

    opening: Callable[[], Iterator[str]]  # of a database with nothing in it

    ids: Bundle[str] = Bundle("ids")
    claims: Bundle[Claim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self._url = contextmanager(type(self).opening)()
        self.database = Database(self._url.__enter__())
        self.jobs = Jobs(self.database)
        self.workers = {name: Searches(self.database, name) for name in ("v", "w")}
        self.known: dict[str, Known] = {}
        self.number = 0
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
        assert job_id == min(waits, key=lambda each: (-waits[each].priority, waits[each].number), default=None)
        return self.take(worker, job_id) if job_id else multiple()

    @rule(target=claims, worker=WORKERS, job_id=ids)
    def take(self, worker: str, job_id: str) -> object:
        """A job that waits, or that of a worker that seems lost."""
        claim, job = self.workers[worker].begin(job_id), self.known.get(job_id)
        if job is not None and job.state == "running":
            job.lose()
        if job is None or job.state not in OPEN:
            assert claim is None
            return multiple()
        assert claim is not None
        job.state, job.worker, job.attempt = "running", worker, job.attempt + 1
        job.changes += 1
        job.is_that_of(claim)
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
        if job and (job.bound is None or bound_ms > job.bound):
            job.learn_bound(bound_ms)
            job.changes += 1

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
            job.wait()
        else:
            job.changes += 1

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
        if not ended:
            job.wait()
        elif job.best is None:
            job.end(state, told.reason)
            job.learn(replace(told, schedule=None, status="infeasible" if state == "infeasible" else "unknown"))
        else:
            job.end("cancelled" if state == "cancelled" else "done", told.reason)
            if told.makespan_ms is not None and told.makespan_ms <= job.best:
                job.learn(told)
