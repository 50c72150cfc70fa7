"""Large-neighbourhood search: free a window of time, solve it exactly, repeat; the best schedule is never lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import cycle

from optpipe.ops import COMPUTE
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import Timed, timed
from optpipe_solver.cpsat.whole import Starts, Window, WindowModel
from optpipe_solver.lift import lift
from optpipe_solver.prune import prune

FIRST = 100  # compute ops in the first windows
PATIENCE_S = 5.0  # for one of the first windows
QUICK_S = 0.5
PLACES = ("warm-up", "cool-down", "between")


def windows(ticks: Ticks, schedule: Schedule, deadline: float, threads: int, seed: int) -> Iterator[Schedule]:
    """Shorter and shorter schedules, each from the one before by solving one window of it, until `deadline` (monotonic clock).

    Windows take turns: the warm-up and the cool-down, where the gap is, and anywhere between. At each place they grow while they are
    solved to proven optimality; where they are not, they shrink a little and get more time. Ends when a window
    that holds everything has been solved.
    """
    chance = random.Random(seed)
    sizes, patience = dict.fromkeys(PLACES, FIRST), dict.fromkeys(PLACES, PATIENCE_S)
    known = timed(ticks, schedule)
    for place in cycle(PLACES):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        window = _choose(known, place, sizes[place], chance)
        began = time.monotonic()
        answer = WindowModel(ticks, known, window, in_order=True).solve(min(left, patience[place]), threads, chance.randrange(2**31))
        solved = answer.proven and window == everything(known)
        if answer.proven:
            sizes[place] = round(sizes[place] * (1.5 if time.monotonic() - began < QUICK_S else 1.15))
        elif answer.end == known.end:
            sizes[place] = max(10, round(sizes[place] * 0.9))
            patience[place] *= 1.5
        if answer.starts and answer.end < known.end:
            schedule = finish(ticks, answer.starts)
            known = timed(ticks, schedule)
            yield schedule
        if solved:
            return


def finish(ticks: Ticks, starts: Starts) -> Schedule:
    """The schedule that a model's starts mean."""
    return prune(lift(ticks.problem, ticks.starts_ms(starts), "cyclic+lns"))


def everything(known: Timed) -> Window:
    return Window(0, known.end + 1)


def _choose(known: Timed, place: str, size: int, chance: random.Random) -> Window:
    """A window of so many compute ops."""
    moments = sorted(at for x, at in known.start.items() if x.kind in COMPUTE)
    most = max(0, len(moments) - size)
    first = {"warm-up": 0, "cool-down": most, "between": chance.randrange(most + 1)}[place]
    last = first + size
    return Window(moments[first] if first else 0, moments[last] if last < len(moments) else everything(known).end)
