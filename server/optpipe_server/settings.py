"""`Settings`: what the service is configured with when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from optpipe_cache import Retention, default_path
from optpipe_cache.storage import KEEP_ALL, PACK_PATH


@dataclass(frozen=True)
class Settings:
    """The defaults suit one machine with one training job."""

    database: str = "sqlite:///optpipe.db"  # `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`
    cache: Path = field(default_factory=default_path)  # of solved schedules, of a service with SQLite
    solves: int = 1  # searches at a time in this process; other jobs wait. With 0, workers search
    # Shared equally by searches, and MiB of the processes of one; a job that asks for more gets as much.
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 1))
    memory_mib: int | None = None
    processes: int = 3  # of the pool: with three, first schedules and the workbench do not wait for a diagnosis
    open_jobs: int = 100  # jobs of one key that may wait or run
    pack: Path | None = PACK_PATH  # solved schedules (`make pack`) behind the cache, by default the release's; or none
    kept: Retention = KEEP_ALL  # jobs that are over; cached schedules that nobody finds, for as many days
    streams: int = 1000  # event streams at a time
    first_schedule_s: float = 10.0  # how long a submission waits for its first schedule
    ping_s: float = 15.0  # between two comments on a quiet event stream
    heartbeat_s: float = 2.0  # between two signs of life of a worker on PostgreSQL
    lost_s: float = 10.0  # a worker that has given none for so long loses its jobs

    @property
    def threads_each(self) -> int:
        """The threads of one search, or of a diagnosis: an equal share."""
        return max(1, self.threads // max(1, self.solves))
