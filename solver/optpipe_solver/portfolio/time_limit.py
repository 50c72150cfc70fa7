"""`TimeLimit`: how long one search may take, and whether its parts are timed by the clock or by a count of work."""

from __future__ import annotations

import time

from optpipe.process.protocol import Request
from optpipe_solver import tuning


class TimeLimit:
    """The time of one request, counted from now on.

    With one thread (`counted`) shares of the time are counted in work, so that the same request has the same answer,
    however busy the machine; the clock only ends what would not end in time.
    """

    def __init__(self, request: Request) -> None:
        self.counted = request.threads == 1
        self.seconds = request.time_limit_s - min(tuning.STOP_S, request.time_limit_s / 4)
        self.deadline = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def until(self, seconds: float) -> float:
        """The moment of `time.monotonic` in so many seconds, or the deadline if that is sooner."""
        return min(self.deadline, time.monotonic() + seconds)
