"""Solves jobs, each by a solver process that has its limits.

`Solve` is one job, `Solves` those of this process. They come from the jobs' table (`EmbeddedWorker`: SQLite, one
process) or from Procrastinate (`TeamWorker`: PostgreSQL, any number of processes). `worker` is `optpipe worker`.
"""

from __future__ import annotations

from typing import Protocol

from optpipe_server.database import Database
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import Settings
from optpipe_server.work.embedded import EmbeddedWorker
from optpipe_server.work.rounds import Rounds
from optpipe_server.work.solves import Solves, default_worker_name

__all__ = ["Rounds", "Worker", "default_worker_name", "make_worker"]


class Worker(Protocol):
    """What solves jobs in this process."""

    solves: Solves

    def start(self) -> None:
        """Begin to take jobs."""

    def nudge(self) -> None:
        """Look for jobs now."""

    def health(self) -> dict[str, str | int]:
        """Report `status`, whether the `database` is reached, and the number of `solves`."""

    def stop(self, timeout_s: float) -> None:
        """End all searches and give the jobs back. None of its processes is left, whatever the database does."""


def make_worker(settings: Settings, database: Database, cache: ScheduleCache, name: str) -> Worker:
    """Return the worker for this database."""
    solves = Solves(settings, database, cache, name)
    if database.sqlite:
        return EmbeddedWorker(solves)
    from optpipe_server.work.team import TeamWorker  # needs Procrastinate, which is optional

    return TeamWorker(settings, database, solves)
