"""What the service is told when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from optpipe_cache import default_path

LOCAL = "local"  # the tenant of a service without keys


@dataclass(frozen=True)
class Settings:
    """All of it has a default that suits one machine with one training job."""

    database: str = "sqlite:///optpipe.db"  # an SQLAlchemy URL
    cache: Path = field(
        default_factory=default_path
    )  # the user's own file of solved schedules: the cache of a service without keys
    shared_cache: bool = False  # tenants find each other's schedules
    # searches at a time in this process; further jobs get their first schedule and wait; 0: other processes solve
    solves: int = 1
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 1))  # of all searches together
    memory_mib: int | None = None  # of one search's processes together
    makers: int = 1  # processes that make first schedules
    queue: int = 100  # jobs of a tenant that may wait
    streams: int = 1000  # event streams at a time
    first_schedule_s: float = 10.0  # how long a submission waits for its first schedule
    ping_s: float = 15.0  # between signs of life on an event stream
    lease_s: float = 15.0  # a worker that is not heard of for so long has lost its jobs
    heartbeat_s: float = 5.0

    @property
    def threads_per_solve(self) -> int:
        return max(1, self.threads // max(1, self.solves))
