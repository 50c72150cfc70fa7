"""Solves jobs, each by a solver process that has its limits.

`Solve` is one job, `Solves` those of this process. They come from the jobs' table (`EmbeddedWorker`: SQLite, one
process) or from Procrastinate (`TeamWorker`: PostgreSQL, any number of processes). `worker` is `optpipe worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_server.database import Database
from optpipe_server.service_cache import ServiceCache
from optpipe_server.settings import Settings
from optpipe_server.work.solves import EmbeddedWorker, Rounds, Solves, default_worker_name

if TYPE_CHECKING:
    from optpipe_server.work.team import TeamWorker

__all__ = ["Rounds", "default_worker_name", "make_worker"]


def make_worker(settings: Settings, database: Database, cache: ServiceCache, name: str) -> EmbeddedWorker | TeamWorker:
    """Return the worker for this database, which takes jobs from `start` until `stop`."""
    solves = Solves(settings, database, cache, name)
    if database.sqlite:
        return EmbeddedWorker(solves)
    from optpipe_server.work.team import TeamWorker  # needs Procrastinate, which is optional

    return TeamWorker(settings, database, solves)
