"""Large-neighbourhood search with the MILP: open a window of the best schedule, solve it, go on from what that gives.

Which window: at the warm-up, at the cool-down, anywhere between on all devices, or anywhere on some neighbouring
devices. Each kind has its own size, that grows while windows are solved to optimality and shrinks when time runs out,
and is chosen the more often the more it gained.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from optpipe.model.arrays import Floats
from optpipe.schedule import Schedule
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.lift import lift
from optpipe_solver.milp.backend import Limits, Task, minimize
from optpipe_solver.milp.frame import Frame, Incumbent, Window, split
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.switches import Switches
from optpipe_solver.prune import prune

METHOD = "milp+lns"
FIRST = 40  # compute ops that the first windows open
FEWEST = 8
PATIENCE_S = 5.0  # for one of the first windows
MEMORY = 0.8  # how much of what a kind of window gained before still counts after one more
LEAST_WORTH = 0.2
KINDS = ("warm-up", "cool-down", "between", "some devices")


@dataclass
class Neighbourhood:
    """A kind of window: how many compute ops it opens, how long it may take, and how often it has gained of late."""

    kind: str
    size: float = FIRST
    patience_s: float = PATIENCE_S
    worth: float = 1.0

    def choose(self, incumbent: Incumbent, chance: random.Random) -> Window:
        devices = len(incumbent.problem.devices)
        few = chance.randint(2, max(2, devices - 1)) if self.kind == "some devices" else devices
        first = chance.randrange(max(1, devices - few + 1))
        open_on = frozenset(range(first, min(devices, first + few)))
        moments = np.sort(incumbent.start[incumbent.compute & np.isin(incumbent.device, list(open_on))])
        most = max(0, len(moments) - round(self.size))
        begin = {"warm-up": 0, "cool-down": most}.get(self.kind, chance.randint(0, most))
        end = begin + round(self.size)
        return Window(
            float(moments[begin]) if begin else 0.0,
            float(moments[end]) if end < len(moments) else incumbent.end_ms + 1.0,
            open_on,
        )

    def learn(self, gained: bool, proven: bool, seconds: float) -> None:
        self.worth = MEMORY * self.worth + (1 - MEMORY) * gained
        if proven:
            self.size *= 1.5 if seconds < self.patience_s / 10 else 1.15
        elif not gained:
            self.size = max(FEWEST, 0.85 * self.size)
            self.patience_s *= 1.2


def search_windows(
    best: Schedule,
    offer: Callable[[Schedule], bool],
    solver: str,
    limits: Limits,
    switches: Switches,
    tell: Callable[[str], None],
) -> None:
    """Solves windows of the best schedule until time is up, its makespan is as short as can be, or a window held
    everything.

    `offer` takes a schedule and says whether it is the best so far. Nothing is done to a schedule with what the model
    does not know.
    """
    chance = random.Random(limits.seed)
    neighbourhoods = [Neighbourhood(kind) for kind in KINDS]
    incumbent = Incumbent(prune(split(best)))
    least_ms = trivial_bound(best.problem, "makespan") * (1 + 1e-9)

    def on_solution(x: Floats) -> None:
        nonlocal best
        found = prune(lift(best.problem, model.starts(x), METHOD))
        if offer(found):
            best = found

    while incumbent.expressible and incumbent.end_ms > least_ms and limits.seconds > 0:
        (chosen,) = chance.choices(neighbourhoods, [max(LEAST_WORTH, n.worth) for n in neighbourhoods])
        window, began, before = chosen.choose(incumbent, chance), time.monotonic(), best
        own = Limits(min(limits.until, began + chosen.patience_s), limits.threads, chance.randrange(2**31))
        frame = Frame(incumbent, window)
        order = switches.order if incumbent.in_order else "none"
        model = Model(best.problem, "makespan", incumbent.end_ms, replace(switches, order=order), frame)
        if model.windows.possible:
            start = assignment(model, incumbent.schedule)
            solver = minimize(
                solver, Task(model.rows, model.C, start, own, on_solution, lambda bound: None, model.violated), tell
            )
        proven = own.seconds > 0
        chosen.learn(best is not before, proven, time.monotonic() - began)
        if proven and frame.is_everything:
            return
        if best is not before:
            incumbent = Incumbent(best)
    if not incumbent.expressible:
        tell(
            "the MILP knows no recompute, no pairs, no single parts and BW only as B and W, so it improves no "
            "schedule that needs them"
        )
