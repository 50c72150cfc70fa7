"""How long a search may take: one clock, handed down to all its parts.

Where work is counted, the same request has the same answer, however busy the machine. `counts_work` says where.
"""

from __future__ import annotations

import time
from math import inf

from optpipe.process.protocol import Request, asked_to_end
from optpipe_solver import tuning


def counts_work(request: Request) -> bool:
    """Whether a search counts its work instead of looking at the wall's clock: with one thread."""
    return request.threads == 1


class Clock:
    """The seconds of a search or of a part of it: of wall time or, if it `counts`, of the work that is reported to it
    by `count` or `spend`.

    After `wall_s` of wall time it is over, whatever is counted; by default after `seconds`, or `tuning.COUNTED_TIMEOUT`
    times as long where work is counted. It is over, too, when the `whole` one is that it is a part of.
    """

    def __init__(
        self, seconds: float = inf, counts: bool = False, wall_s: float | None = None, whole: Clock | None = None
    ) -> None:
        self.seconds, self.counts, self._whole = seconds, counts, whole
        if wall_s is None:
            wall_s = seconds * (tuning.COUNTED_TIMEOUT if counts else 1.0)
        self._began = time.monotonic()
        self._until = self._began + wall_s
        self._spent_s = 0.0

    @classmethod
    def for_request(cls, request: Request) -> Clock:
        """The clock of an engine's search."""
        return cls(request.time_limit_s, counts_work(request))

    @property
    def until(self) -> float:
        """The moment of `time.monotonic` at which it is over at the latest."""
        return min(self._until, self._whole.until) if self._whole else self._until

    @property
    def wall_left_s(self) -> float:
        """Seconds of wall time left; none where the parent asks for the end."""
        return 0.0 if asked_to_end.is_set() else max(0.0, self.until - time.monotonic())

    @property
    def left_s(self) -> float:
        """Seconds left, by count where work is counted; none once the wall's time is over."""
        wall_s = self.wall_left_s
        return max(0.0, self.seconds - self._spent_s) if self.counts and wall_s else wall_s

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    @property
    def passed_s(self) -> float:
        """Seconds of wall time since it began."""
        return time.monotonic() - self._began

    @property
    def spent_s(self) -> float | None:
        """Seconds of counted work; None where wall time counts."""
        return self._spent_s if self.counts else None

    def count(self, ops: float, ops_per_s: float | None = None) -> None:
        """Report work: so many compute ops, states or the like; by default `tuning.OPS_PER_S` of them are a second."""
        self._spent_s += ops / (ops_per_s or tuning.OPS_PER_S)

    def spend(self, seconds: float) -> None:
        """Report work by the seconds that it counts for."""
        self._spent_s += seconds

    def share(self, share: float) -> Clock:
        """A clock for a share of this clock's seconds.

        Where work is counted, it has this clock's wall time. What is reported to it is not reported to this one.
        """
        seconds = share * self.seconds
        return Clock(seconds, self.counts, inf if self.counts else seconds, whole=self)

    def until_half(self) -> Clock:
        """A clock that is over when half of this clock's wall time is."""
        return Clock(self.wall_left_s - self.seconds / 2, whole=self)

    def last(self, seconds: float) -> None:
        """Let its wall time be so many seconds at least, since it began."""
        self._until = max(self._until, self._began + seconds)

    def stop(self) -> None:
        """Let it be over now, and all clocks within it."""
        self._until = self._began

    def moment(self, seconds: float) -> float:
        """The moment of `time.monotonic` in so many seconds of wall time, or `until` if that is sooner."""
        return min(self.until, time.monotonic() + seconds)


class FirstClock(Clock):
    """The time for what comes before a search: `tuning.FIRST_S` or the search's time limit, in seconds in which a
    processor runs this thread, so that other work beside it takes none of them."""

    def __init__(self, time_limit_s: float = inf) -> None:
        super().__init__(min(tuning.FIRST_S, time_limit_s))
        self._began_at_s = time.thread_time()

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - (time.thread_time() - self._began_at_s))


UNLIMITED = Clock()
