"""Large-neighbourhood search: free a window of time, solve it exactly, repeat; the best schedule is never lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from optpipe.ops import COMPUTE
from optpipe.schedule import Schedule
from optpipe_solver.cyclic.ticks import Ticks
from optpipe_solver.cyclic.timed import Timed, timed
from optpipe_solver.cyclic.unroll import prune
from optpipe_solver.cyclic.whole import Starts, Window, WindowModel
from optpipe_solver.lift import lift

FIRST = 100  # compute ops in the first window
PATIENCE_S = 4.0  # for one window
QUICK_S = 0.5


def windows(ticks: Ticks, schedule: Schedule, deadline: float, threads: int, seed: int) -> Iterator[Schedule]:
    """Shorter and shorter schedules, each from the one before by solving one window of it, until `deadline` (monotonic clock).

    Windows grow while they are solved to proven optimality and shrink where they are not. Ends when a window that holds everything has
    been solved.
    """
    chance = random.Random(seed)
    size = FIRST
    known = timed(ticks, schedule)
    while (left := deadline - time.monotonic()) > 0:
        window = _choose(known, size, chance)
        began = time.monotonic()
        answer = WindowModel(ticks, known, window, in_order=True).solve(min(left, PATIENCE_S), threads, chance.randrange(2**31))
        if answer.starts and answer.end < known.end:
            schedule = finish(ticks, answer.starts)
            known = timed(ticks, schedule)
            yield schedule
        elif answer.proven and window == everything(known):
            return
        quick = answer.proven and time.monotonic() - began < QUICK_S
        size = max(10, round(size * (1.25 if quick else 1.0 if answer.proven else 0.85)))


def finish(ticks: Ticks, starts: Starts) -> Schedule:
    """The schedule that a model's starts mean."""
    return prune(lift(ticks.problem, ticks.starts_ms(starts), "cyclic+lns"))


def everything(known: Timed) -> Window:
    return Window(0, known.end + 1)


def _choose(known: Timed, size: int, chance: random.Random) -> Window:
    """A window of so many compute ops, anywhere, but often at one of the ends: warm-up and cool-down are where the gap is."""
    moments = sorted(at for x, at in known.start.items() if x.kind in COMPUTE)
    first = max(0, min(chance.randrange(-size, max(1, len(moments))), len(moments) - size))
    last = first + size
    return Window(moments[first] if first else 0, moments[last] if last < len(moments) else everything(known).end)
