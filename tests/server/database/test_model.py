"""Jobs against a plain Python model, on both databases: clients and workers act in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import consumes, invariant, multiple, rule, run_state_machine_as_test
from support.service.job_model import BOUNDS, PROBLEMS, SCHEDULES, Known, WorkerRules, result_of
from support.service.postgres import Postgres
from support.service.work import row

from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe_server.database import InitialResult, NewJob
from optpipe_server.database.changes import CANCELLED, ConflictError, KeyReusedError, StaleError, TooManyOpenError
from optpipe_server.database.tables import OPEN

MOST_OPEN = 3
NAMES = ("a", "b")
STARTS = st.none() | st.tuples(st.integers(0, 1), BOUNDS)


class Model(WorkerRules):
    def open(self, name: str) -> int:
        return sum(job.key_name == name and job.state in OPEN for job in self.known.values())

    def start(self, problem: Problem, given: tuple[int, float] | None) -> InitialResult:
        return InitialResult(result_of(SCHEDULES[problem.sha256][given[0]], given[1])) if given else InitialResult()

    @rule(
        target=WorkerRules.ids,
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
        there = next((job_id for job_id, job in self.known.items() if key and job.key == key), None)
        try:
            job_id, new = self.jobs.add(asked, start, most_open=MOST_OPEN)
        except TooManyOpenError:
            assert there is None
            assert first_state == "queued"
            assert self.open(name) >= MOST_OPEN
            return multiple()
        except KeyReusedError:
            assert there is not None
            assert self.first_problem[there] != problem.sha256
            return multiple()
        if not new:
            assert (there, self.first_problem[job_id]) == (job_id, problem.sha256)
            return multiple()
        assert there is None
        assert first_state != "queued" or self.open(name) < MOST_OPEN
        self.number += 1
        job = Known(name, problem, priority, self.number, 10.0, first_state, key)
        job.learn(start.best)
        if start.best.schedule is not None:
            job.add(start.best)
        job.changes = 0  # since it is there
        self.known[job_id] = job
        self.first_problem[job_id] = problem.sha256
        return job_id

    @rule(job_id=WorkerRules.ids)
    def cancel(self, job_id: str) -> None:
        job = self.known.get(job_id)
        if job is None:
            with pytest.raises(LookupError):
                self.jobs.cancel(job_id)
            return
        self.jobs.cancel(job_id)
        if job.state == "queued":
            job.cancel = True
            job.end("cancelled", CANCELLED)
        elif job.state == "running" and not job.cancel:
            job.cancel = True
            job.changes += 1

    @rule(job_id=WorkerRules.ids, more=st.floats(-1, 5), stale=st.booleans())
    def extend(self, job_id: str, more: float, stale: bool) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
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
            job.changes += 1

    @rule(job_id=WorkerRules.ids, problem=st.sampled_from(PROBLEMS), given=STARTS, stale=st.booleans())
    def change_problem(self, job_id: str, problem: Problem, given: tuple[int, float] | None, stale: bool) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
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
            assert self.open(job.key_name) >= MOST_OPEN
            return
        assert not stale
        assert job.state != "cancelled"
        assert not (job.cancel and job.state in OPEN)
        job.cancel = False
        assert first_state != "queued" or job.state in OPEN or self.open(job.key_name) < MOST_OPEN
        job.state, job.worker = first_state, None
        job.problem, job.version, job.reason, job.bound = problem, job.version + 1, None, None
        job.spent_s, job.crashes, job.losses = 0.0, 0, 0
        job.learn(start.best)
        job.changes += 1
        if start.best.schedule is not None:
            job.add(start.best)

    @rule(job_id=WorkerRules.ids, seq=st.integers(0, 3), step=st.integers(0, 10**12))
    def adopt(self, job_id: str, seq: int, step: int) -> None:
        job = self.known.get(job_id)
        if job is None:
            return
        try:
            self.jobs.adopt(job_id, seq, step, None)
        except LookupError:
            assert not 1 <= seq <= len(job.incumbents)
            return
        assert 1 <= seq <= len(job.incumbents)
        job.adopted[seq] = step
        job.changes += 1

    @rule(job_id=consumes(WorkerRules.ids))
    def purge(self, job_id: str) -> None:
        job = self.known.pop(job_id, None)
        if job is None:
            with pytest.raises(LookupError):
                self.jobs.purge(job_id)
        else:
            self.jobs.purge(job_id)
            assert (self.jobs.incumbents(job_id), self.jobs.bounds(job_id), self.jobs.log(job_id, 0, 9)) == ([], [], [])

    @invariant()
    def the_database_says_the_same(self) -> None:
        there = {job.id: job for job in self.jobs.page(None, None, 200)}
        assert {*there} == {*self.known}
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
