"""What workers do with jobs, against a plain Python model of them; the test adds what clients do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, Jobs, Leases
from optpipe_server.database.leases import MOST_CRASHES, Claim, LostError
from optpipe_server.database.refusals import CANCELLED
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
        self.workers = {name: Leases(self.database, name) for name in ("v", "w")}
        self.known: dict[str, Known] = {}
        self.number = 0
        self.first_problem: dict[str, str] = {}  # by the job, what its key came with

    def teardown(self) -> None:
        self.database.close()
        self._url.__exit__(None, None, None)

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

    @rule(target=claims, worker=WORKERS)
    def claim(self, worker: str) -> object:
        claim = self.workers[worker].claim()
        waiting = [(-job.priority, job.number, job_id) for job_id, job in self.known.items() if job.state == "queued"]
        if claim is None:
            assert not waiting
            return multiple()
        assert claim.job_id == min(waiting)[-1]
        job = self.known[claim.job_id]
        job.state, job.worker, job.attempt = "running", worker, job.attempt + 1
        job.changes += 1
        job.is_that_of(claim)
        return claim

    @rule(claim=claims, worker=WORKERS, spent=st.floats(0, 9))
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

    @rule(claim=claims, worker=WORKERS, which=st.integers(0, 1), bound=BOUNDS)
    def append(self, claim: Claim, worker: str, which: int, bound: float) -> None:
        result = result_of(SCHEDULES[claim.problem.sha256][which], bound)
        job, kept = self.write(claim, worker, lambda leases: leases.append(claim, result))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept:
            job.add(result)

    @rule(claim=claims, worker=WORKERS, bound=BOUNDS)
    def raise_bound(self, claim: Claim, worker: str, bound: float) -> None:
        told_ms = bound * min(schedule.makespan_ms for schedule in SCHEDULES[claim.problem.sha256])
        job, kept = self.write(claim, worker, lambda leases: leases.raise_bound(claim, told_ms))
        if job is None:
            return
        assert kept == (job.version == claim.problem_version)
        if kept and (job.bound is None or told_ms > job.bound):
            job.learn_bound(told_ms)
            job.changes += 1

    @rule(claim=claims, worker=WORKERS)
    def note(self, claim: Claim, worker: str) -> None:
        self.write(claim, worker, lambda leases: leases.note(claim, "still here"))

    @rule(target=claims, claim=claims, worker=WORKERS, spent=st.floats(0, 9))
    def reload(self, claim: Claim, worker: str, spent: float) -> object:
        job, new = self.write(claim, worker, lambda leases: leases.reload(claim, spent))
        if job is None:
            return multiple()
        assert new.spent_s == (spent if claim.problem_version == job.version else job.spent_s)
        job.is_that_of(replace(new, spent_s=job.spent_s))
        return new

    @rule(target=claims, claim=consumes(claims), worker=WORKERS, spent=st.floats(0, 9))
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

    @rule(claim=claims, worker=WORKERS, spent=st.floats(0, 9))
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
