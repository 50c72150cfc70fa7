"""Jobs as clients and workers make them, workers with a fake solver, and what must hold in the database whatever
happens to them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import select

from optpipe import Problem, Result, Schedule, check
from optpipe.options import SolveOptions
from optpipe.process import process_tree
from optpipe.process.protocol import Programs
from optpipe_server import Settings
from optpipe_server.database import Database, InitialResult, Jobs, NewJob
from optpipe_server.database.tables import incumbents, jobs, problems
from optpipe_server.service_cache import ServiceCache
from optpipe_server.work import make_worker
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until

PROBLEM = chain()
SLOW, FAST = one_by_one(PROBLEM), gpipe(PROBLEM)


def found(schedule: Schedule, bound: float | None = 1.0) -> Result:
    result = Result("feasible", schedule, lower_bound_ms=bound, method=schedule.method)
    return replace(result, status="optimal") if result.gap == 0 else result


def start(schedule: Schedule | None = SLOW) -> InitialResult:
    return InitialResult(found(schedule)) if schedule else InitialResult()


def submit(database: Database, schedule: Schedule | None = SLOW, **wanted: Any) -> str:
    priority = wanted.pop("priority", 0)
    asked = NewJob(wanted.pop("problem", PROBLEM), SolveOptions(**wanted), priority)
    job_id, new = Jobs(database).add(asked, start(schedule), most_open=100)
    assert new
    return job_id


def row(database: Database, job_id: str) -> Any:
    with database.read() as db:
        return db.execute(select(jobs).where(jobs.c.id == job_id)).one()


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


def problem(scale: float = 1.0, m: int = 8, name: str = "chain") -> Problem:
    """A problem with memory for everything, so that all of `chain`'s schedules are valid."""
    return chain(memory=m, m=m, scale=scale).model_copy(update={"name": name})


class Work:
    """One database with a client's view of it, and workers that come and go."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.jobs = database, Jobs(database)
        self.settings = Settings(
            cache=folder / "cache.sqlite", pack=None, threads=2, solves=2, heartbeat_s=0.5, lost_s=3.0
        )
        self.cache = ServiceCache(self.settings, database)

    @contextmanager
    def worker(self, name: str = "worker", **settings: Any) -> Iterator[Any]:
        url = self.database.engine.url.render_as_string(hide_password=False)
        worker = make_worker(replace(self.settings, database=url, **settings), self.database, self.cache, name)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop(20.0)
            assert process_tree.members(process_tree.OWN) == [], "a child outlived its worker"

    def submit(
        self,
        method: str,
        posed: Problem | None = None,
        *,
        time_limit_s: float = 50.0,
        start: InitialResult | None = None,
        priority: int = 0,
        **options: Any,
    ) -> str:
        asked = SolveOptions(method=method, time_limit_s=time_limit_s, **options)
        job = NewJob(posed or problem(), asked, priority)
        return self.jobs.add(job, start or InitialResult(), most_open=1000)[0]

    def job(self, job_id: str) -> Any:
        return self.jobs.job(job_id)

    def ended(self, job_id: str) -> Any:
        """Wait until the job is over; return it."""
        until(lambda: self.job(job_id).state not in ("queued", "running"), f"the end of {job_id}")
        return self.job(job_id)

    def found(self, job_id: str, seq: int = 1) -> None:
        """Wait until the job has that incumbent."""
        until(lambda: self.job(job_id).last_seq >= seq, f"incumbent {seq} of {job_id}")

    def lines(self, job_id: str) -> list[str]:
        return [row.text for row in self.jobs.log(job_id, 0, 1000)]


def sound(database: Database, newest: int = 1_000_000) -> dict[str, list[Any]]:
    """Check what must hold of the newest jobs at any time; return the rows of each one's incumbents in order.

    Incumbents are numbered without a gap, valid for their problem, each better than the one before of the same problem,
    and none is written by an attempt that another one had followed.
    """
    with database.read() as db:  # in this order: on PostgreSQL each statement sees what has been committed meanwhile
        of_job: dict[str, list[Any]] = {
            row.id: [] for row in db.execute(select(jobs.c.id).order_by(jobs.c.number.desc()).limit(newest))
        }
        for row in db.execute(
            select(incumbents).where(incumbents.c.job.in_(of_job)).order_by(incumbents.c.job, incumbents.c.seq)
        ):
            of_job[row.job].append(row)
        last = {row.id: (row.last_seq, row.attempt) for row in db.execute(select(jobs))}
        known = {
            (row.job, row.version): Problem.model_validate_json(row.problem) for row in db.execute(select(problems))
        }
    for job_id, rows in of_job.items():
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) <= last[job_id][0]
        assert all(row.attempt <= last[job_id][1] for row in rows)
        for row in rows:
            schedule = Programs.model_validate_json(row.programs).schedule(
                known[job_id, row.problem_version], row.method
            )
            assert check(schedule.problem, schedule) == []
            assert schedule.makespan_ms == row.makespan_ms
        for before, after in pairwise(rows):
            assert before.problem_version <= after.problem_version
            if before.problem_version == after.problem_version:
                assert after.makespan_ms < before.makespan_ms
                assert after.attempt >= before.attempt
    return of_job
