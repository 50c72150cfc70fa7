"""What workers do with jobs, against a plain Python model of them; the test adds what clients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule

from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, Jobs, Searches
from optpipe_server.database.refusals import CANCELLED
from optpipe_server.database.searches import MOST_CRASHES, Claim, LostError
from optpipe_server.database.tables import OPEN
from support.problems.chain import chain, gpipe, one_by_one
from support.service.jobs import found
from support.service.known_job import Known

PROBLEMS = [chain(scale=scale) for scale in (1.0, 1.5, 2.0)]
SCHEDULES = {problem.sha256: [one_by_one(problem), gpipe(problem)] for problem in PROBLEMS}
WORKERS = st.sampled_from(["v", "w"])
BOUNDS = st.sampled_from([0.25, 0.5, 1.0])


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
        open_jobs = {
            each: job for each, job in self.known.items() if job.state == "queued" or (left and each in running)
        }
        first = min(open_jobs, key=lambda each: (-open_jobs[each].priority, open_jobs[each].number), default=None)
        assert job_id == first
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
        changes = self.workers[worker].changes([claim])
        self.workers[worker].store_spent(claim, spent)
        assert {*changes} == ({claim.job_id} if job else set())
        if job:
            requested = changes[claim.job_id]
            assert (requested.cancelled, requested.problem_version) == (job.cancel, job.version)
            job.spent_s = spent if claim.problem_version == job.version else job.spent_s

    @rule(claim=claims, worker=WORKERS, which=st.integers(0, 1), bound=BOUNDS)
    def append(self, claim: Claim, worker: str, which: int, bound: float) -> None:
        result = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, kept = self.write(claim, worker, lambda searches: searches.append(claim, result))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept:
            job.add(result)

    @rule(claim=claims, worker=WORKERS, bound=BOUNDS)
    def raise_bound(self, claim: Claim, worker: str, bound: float) -> None:
        told_ms = bound * min(schedule.makespan_ms for schedule in SCHEDULES[claim.problem.sha256])
        job, kept = self.write(claim, worker, lambda searches: searches.raise_bound(claim, told_ms))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept and (job.bound is None or told_ms > job.bound):
            job.learn_bound(told_ms)
            job.changes += 1

    @rule(claim=claims, worker=WORKERS)
    def note(self, claim: Claim, worker: str) -> None:
        self.write(claim, worker, lambda searches: searches.note(claim, "still here"))

    @rule(target=claims, claim=claims, worker=WORKERS, spent=st.floats(0, 9), crash=st.sampled_from([None, "signal 9"]))
    def reload(self, claim: Claim, worker: str, spent: float, crash: str | None) -> object:
        job, new = self.write(claim, worker, lambda searches: searches.reload(claim, spent, crash))
        if job is None:
            return multiple()
        spent = spent if claim.problem_version == job.version else job.spent_s
        if crash:
            job.spent_s, job.crashes, job.changes = spent, job.crashes + 1, job.changes + 1
        assert (new is None) == bool(crash and job.crashes > MOST_CRASHES)
        if new is None:
            return multiple()
        assert (new.spent_s, new.crashes) == (spent, job.crashes)
        job.is_that_of(replace(new, spent_s=job.spent_s))
        return new

    @rule(claim=claims, worker=WORKERS, spent=st.floats(0, 9))
    def give_back(self, claim: Claim, worker: str, spent: float) -> None:
        job, _ = self.write(claim, worker, lambda searches: searches.give_back(claim, spent))
        if job is None:
            return
        if job.cancel:
            job.end("cancelled", CANCELLED)
        else:
            job.spent_s = spent if claim.problem_version == job.version else job.spent_s
            job.wait()

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
