"""Large-neighbourhood search with the MILP: solve a window of the best schedule, and go on from what that gives.

A window is at the warm-up, at the cool-down, anywhere between on all devices, or anywhere on some neighbouring devices.
Each kind has its own size, which grows while windows are solved to optimality and shrinks when time runs out, and is
chosen the more often the more it gained.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from optpipe.evaluate.objective import reaches
from optpipe.model.arrays import Floats
from optpipe.schedule import Schedule
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.lift import lift
from optpipe_solver.milp.backend import minimize
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.schedule_graph import ScheduleGraph, split_if_it_fits
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.surroundings import OpenWindow, Surroundings
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.task import Limits, Task
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
    """A kind of window: how many compute ops it opens, how long it may take, and how often it gained of late."""

    kind: str
    size: float = FIRST
    patience_s: float = PATIENCE_S
    worth: float = 1.0

    def choose(self, graph: ScheduleGraph, random_: random.Random) -> OpenWindow:
        devices = len(graph.problem.devices)
        few = random_.randint(2, max(2, devices - 1)) if self.kind == "some devices" else devices
        first = random_.randrange(max(1, devices - few + 1))
        open_on = frozenset(range(first, min(devices, first + few)))
        moments = np.sort(graph.start[graph.compute & np.isin(graph.device, list(open_on))])
        most = max(0, len(moments) - round(self.size))
        begin = {"warm-up": 0, "cool-down": most}.get(self.kind, random_.randint(0, most))
        end = begin + round(self.size)
        return OpenWindow(
            float(moments[begin]) if begin else 0.0,
            float(moments[end]) if end < len(moments) else graph.end_ms + 1.0,
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
    """Solves windows of the best schedule until time is up, it is proven, or a window of everything is solved.

    `offer` takes a schedule and says whether it is the best so far. A schedule that the model cannot express is left
    alone.
    """
    random_ = random.Random(limits.seed)
    neighbourhoods = [Neighbourhood(kind) for kind in KINDS]
    graph = ScheduleGraph(prune(split_if_it_fits(best)))
    bound = trivial_bound(best.problem, "makespan")

    def on_solution(x: Floats) -> None:
        nonlocal best
        found = prune(lift(best.problem, model.starts(x), METHOD))
        if offer(found):
            best = found

    while graph.expressible and not reaches(graph.end_ms, bound) and limits.seconds > 0:
        (chosen,) = random_.choices(neighbourhoods, [max(LEAST_WORTH, n.worth) for n in neighbourhoods])
        window, began, before = chosen.choose(graph, random_), time.monotonic(), best
        own = Limits(min(limits.until, began + chosen.patience_s), limits.threads, random_.randrange(2**31))
        around = Surroundings(graph, window)
        order = switches.order if graph.in_order else "none"
        model = Model(best.problem, "makespan", graph.end_ms, replace(switches, order=order), around)
        if model.possible:
            start = assignment(model.variables, graph.schedule)
            solver = minimize(
                solver, Task(model.rows, model.C, start, own, on_solution, lambda bound: None, model.violated), tell
            )
        proven = own.seconds > 0
        chosen.learn(best is not before, proven, time.monotonic() - began)
        if proven and around.is_everything:
            return
        if best is not before:
            graph = ScheduleGraph(best)
    if not graph.expressible:
        tell(
            "the MILP has no recompute, no pairs, no single parts, and BW only as B and W, so it does not improve a "
            "schedule that needs them"
        )
