"""Large-neighbourhood search with the MILP: solve a window of the best schedule, and go on from what that gives.

A window is at the warm-up, at the cool-down, anywhere between on all devices, or anywhere on some neighbouring devices.
Each kind has its own size, which grows while windows are solved to optimality and shrinks when time runs out, and is
chosen the more often the more it gained.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from optpipe.evaluate.objective import TOLERANCE, Objective, reaches
from optpipe.lift import lift
from optpipe.model.arrays import Floats
from optpipe.prune import prune
from optpipe.schedule import Schedule
from optpipe_solver.milp.backend import minimize, most_rows, smallest_model
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.schedule_graph import ScheduleGraph, split_if_it_fits
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.surroundings import OpenWindow, Surroundings
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.task import Limits, Task

METHOD = "milp+lns"
FIRST = 40  # compute ops that the first windows open
FEWEST = 8
SHRINK = 0.8  # of a window that a backend does not take
AS_LONG = 1 + 4 * TOLERANCE  # of a schedule's length: with that horizon a window admits the schedule itself
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


class WindowSearch:
    """Windows of the best schedule, one after the other.

    Parameters
    ----------
    offer
        Takes a schedule and says whether it is the best so far.
    begun
        Called before each window is solved.
    bound_ms
        A schedule of that length is optimal.
    """

    def __init__(
        self,
        offer: Callable[[Schedule], bool],
        solver: str,
        limits: Limits,
        switches: Switches,
        tell: Callable[[str], None],
        begun: Callable[[], None],
        objective: Objective,
        bound_ms: float,
    ) -> None:
        self._offer, self._solver, self._limits = offer, solver, limits
        self._tell, self._begun = tell, begun
        self._objective: Objective = objective
        self._bound_ms = bound_ms
        self._most = most_rows(solver)
        self._switches = smallest_model(solver, switches)
        self._solved: Counter[str] = Counter()  # windows by who solved them
        self._nodes = self._proven = self._gained = self._shrunk = self._largest = 0
        self._end = "not ended"

    @property
    def summary(self) -> str:
        """How the search ended, or how far it is."""
        by = ", ".join(f"{count} window{'s' * (count != 1)} by {solver}" for solver, count in self._solved.items())
        by = by or "no window"
        shrunk = f", {self._shrunk} shrunk to {self._most} variables and rows" if self._shrunk else ""
        return (
            f"{by}: {self._proven} optimal, {self._gained} shorter{shrunk}; {self._nodes} nodes, up to {self._largest} "
            f"variables, {self._limits.spent_s:.1f} s; {self._end}"
        )

    def run(self, best: Schedule) -> None:
        """Solves windows until time is up, the best is proven, or a window of everything is solved. A schedule that the
        model cannot express is left alone.

        Only windows in which something shorter may be are solved, and one in any case: of a schedule that is proven it
        says that nothing is.
        """
        limits = self._limits
        random_ = random.Random(limits.seed)
        neighbourhoods = [Neighbourhood(kind) for kind in KINDS]
        graph = ScheduleGraph(prune(split_if_it_fits(best)), self._objective)
        while graph.expressible and limits.seconds > 0:
            (chosen,) = random_.choices(neighbourhoods, [max(LEAST_WORTH, n.worth) for n in neighbourhoods])
            window, began = chosen.choose(graph, random_), time.monotonic()
            own = Limits(min(limits.until, began + chosen.patience_s), limits.threads, random_.randrange(2**31))
            around = Surroundings(graph, window)
            order = self._switches.order if graph.in_order else "none"
            horizon_ms = graph.end_ms if self._solved.total() else AS_LONG * graph.end_ms
            model = Model(graph.problem, "makespan", horizon_ms, replace(self._switches, order=order), around)
            if model.possible and self._is_too_large(model) and chosen.size > FEWEST:
                chosen.size, self._shrunk = max(FEWEST, SHRINK * chosen.size), self._shrunk + 1
                continue
            found, ended = self._solve(model, graph, own) if model.possible else (None, True)
            proven = ended and own.seconds > 0
            self._proven += proven and model.possible
            self._gained += found is not None
            chosen.learn(found is not None, proven, time.monotonic() - began)
            if proven and around.is_everything and (self._objective == "makespan" or found is None):
                self._end = "a window of everything is solved"
                return
            if found is not None:
                graph = ScheduleGraph(found, self._objective)
            if self._solved.total() and reaches(graph.length_ms, self._bound_ms):
                self._end = "proven optimal by a bound without search"
                return
        self._end = "time is up"
        if not graph.expressible:
            self._end = "left alone"
            self._tell(
                "the MILP has no recompute, no pairs, no single parts, and BW only as B and W, so it does not improve "
                "a schedule that needs them; cpsat and lns do"
            )

    def _is_too_large(self, model: Model) -> bool:
        most = most_rows(self._solver)  # none once HiGHS has taken its place
        return most is not None and not model.rows.fits(most)

    def _on_start(self, solver: str) -> None:
        self._solved[solver] += 0
        self._begun()

    def _solve(self, model: Model, graph: ScheduleGraph, limits: Limits) -> tuple[Schedule | None, bool]:
        """The best schedule that the window leads to, None if none is better than all before; and whether its search
        ended before time was up."""
        best = None

        def on_solution(x: Floats) -> None:
            nonlocal best
            found = prune(lift(graph.problem, model.starts(x), METHOD))
            if self._offer(found):
                best = found

        start = assignment(model.variables, graph.schedule)
        task = Task(model.rows, model.C, start, limits, on_solution, lambda bound: None, model.violated, self._on_start)
        self._solver, outcome = minimize(self._solver, task, self._tell)
        self._solved[outcome.solver] += 1
        self._nodes += outcome.nodes or 0
        self._largest = max(self._largest, len(model.rows.lower))
        return best, outcome.status != "time is up"
