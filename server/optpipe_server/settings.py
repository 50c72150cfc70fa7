"""What the service is told when it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from optpipe_cache import default_path


@dataclass(frozen=True)
class Settings:
    """All of it has a default that suits one machine with one training job."""

    database: str = "sqlite:///optpipe.db"  # an SQLAlchemy URL
    cache: Path = field(default_factory=default_path)  # the file of solved schedules
    solves: int = 1  # searches at a time; further jobs get their first schedule and wait
    threads: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) - 1))  # of all searches together
    queue: int = 100  # jobs that may wait
    first_schedule_s: float = 10.0  # how long a submission waits for its first schedule
    ping_s: float = 15.0  # between signs of life on an event stream

    @property
    def threads_per_solve(self) -> int:
        return max(1, self.threads // self.solves)
