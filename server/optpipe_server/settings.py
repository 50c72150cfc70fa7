"""`Settings`: what the service is configured with when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from optpipe_cache import Retention, default_path
from optpipe_cache.storage import KEEP_ALL, PACK_PATH


@dataclass(frozen=True)
class Settings:
    """The defaults suit one machine with one training job.

    Attributes
    ----------
    database
        SQLAlchemy URL: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
    cache
        File of solved schedules of a service with SQLite, by default the user's own.
    solves
        Searches at a time in this process; other jobs get their first schedule and wait. With 0, workers search.
    threads
        For all searches together; by default one less than there are cores. A job that asks for more gets as many.
    memory_mib
        Limit for all processes of one search together. A job that asks for more gets as much.
    processes
        Of the pool: first schedules, the workbench, pictures and diagnoses. With three none waits for a longer kind.
    open_jobs
        Jobs of one key that may wait or run.
    pack
        File of solved schedules (`make pack`) behind the cache, by default the release's; None is no file.
    kept
        Which jobs are kept when they are over, by default all. Cached schedules that nobody finds are
        kept for the same number of days.
    streams
        Event streams at a time.
    first_schedule_s
        How long a submission waits for its first schedule.
    ping_s
        Time between two comments on a quiet event stream.
    heartbeat_s
        Time between two signs of life of a worker on PostgreSQL.
    lost_s
        A worker on PostgreSQL that has given none for so long loses its jobs.
    """

    database: str = "sqlite:///optpipe.db"
    cache: Path = field(default_factory=default_path)
    solves: int = 1
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 1))
    memory_mib: int | None = None
    processes: int = 3
    open_jobs: int = 100
    pack: Path | None = PACK_PATH
    kept: Retention = KEEP_ALL
    streams: int = 1000
    first_schedule_s: float = 10.0
    ping_s: float = 15.0
    heartbeat_s: float = 2.0
    lost_s: float = 10.0

    @property
    def threads_per_solve(self) -> int:
        return max(1, self.threads // max(1, self.solves))


def within(asked: int | None, most: int | None) -> int | None:
    """Return what was asked for within what the operator allows; None is no limit."""
    return min((limit for limit in (asked, most) if limit is not None), default=None)
