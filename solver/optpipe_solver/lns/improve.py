"""Window after window of a schedule, each around a moment at which a device is idle, as wide as can be solved quickly.

A solution that ends no later is taken: even if nothing is gained, it makes room for other windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from optpipe.evaluate.objective import Objective
from optpipe.lift import lift, prune
from optpipe.model.ops import COMPUTE
from optpipe.model.problem import Problem
from optpipe.process.protocol import Request
from optpipe.schedule import Schedule
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import Grid, GridSchedule, ensure_start, is_expressible, place_on_grid
from optpipe_solver.cpsat.model import WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.incumbents import Emit, Incumbents

METHOD = "lns"
OPS_PER_S = 40_000  # that Python puts into a model and takes out of it again
FIRST_OPS = 60  # compute ops in the first windows
FEWEST_OPS = 8  # in a window
QUICK_S = 0.15  # at first windows that are solved sooner may grow
PATIENCE = 6  # one window may take this times as long
VAIN_WINDOWS = 10  # in a row, until windows have more time
SCORE_KEPT = 0.9  # of a breadth's score after one more window
LEAST_CHANCE = 0.3  # of every breadth to be chosen, as a share of the best one's


@dataclass
class Breadth:
    """A size of windows: how many neighbouring devices are free at a time, with how many compute ops."""

    devices: int
    most_ops: int  # of that many devices
    ops: float = FIRST_OPS  # of a window
    score: float = 0.0  # what such windows gained of late, in ms per second

    def learn(self, gained_ms: float, used_s: float, proven: bool, quick_s: float) -> None:
        """Learn from one window whether such windows pay, and whether to try larger or smaller ones."""
        self.score += (1 - SCORE_KEPT) * (gained_ms / max(used_s, quick_s) - self.score)
        if proven and used_s < quick_s:
            self.ops = min(self.most_ops, 1.15 * self.ops)
        elif not proven or used_s > 2 * quick_s:
            self.ops = max(FEWEST_OPS, 0.85 * self.ops)


class WindowChoice:
    """An adaptive choice of windows: breadths by what they gained, moments by where time is lost."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.problem, self.random = grid, grid.problem, random.Random(0)
        self.quick_s, self.vain = QUICK_S, 0
        devices = len(self.problem.devices)
        ops = 3 * len(self.problem.stages) * self.problem.microbatches
        self.breadths = [
            Breadth(n, ops * n // devices) for n in sorted({max(min(2, devices), devices // cut) for cut in (1, 2, 4)})
        ]

    def window(self, incumbent: GridSchedule) -> tuple[Breadth, Window]:
        """A window of the incumbent, and its breadth."""
        least = max(1e-9, *(breadth.score for breadth in self.breadths)) * LEAST_CHANCE
        breadth = self.random.choices(self.breadths, [breadth.score + least for breadth in self.breadths])[0]
        device, begin, end = 0, 0, incumbent.end
        if idle := list(self._idle(incumbent)):
            device, begin, end = self.random.choices(idle, [end - begin for _, begin, end in idle])[0]
        return breadth, self._window_near(incumbent, breadth, device, self.random.randint(begin, end))

    def learn(self, breadth: Breadth, gained_ms: float, used_s: float, proven: bool) -> None:
        """Learn from one window for the next ones."""
        breadth.learn(gained_ms, used_s, proven, self.quick_s)
        self.vain = 0 if gained_ms else self.vain + 1
        if self.vain >= VAIN_WINDOWS:
            self.quick_s, self.vain = self.quick_s * 1.5, 0

    def _window_near(self, incumbent: GridSchedule, breadth: Breadth, device: int, moment: int) -> Window:
        """The ops nearest to a moment, of this device and its neighbours."""
        last = len(self.problem.devices) - breadth.devices
        first = self.random.randint(max(0, device - breadth.devices + 1), min(device, last))
        devices = frozenset(range(first, first + breadth.devices))
        starts = sorted(
            at
            for x, at in incumbent.start.items()
            if x.kind in COMPUTE and self.problem.stages[x.stage].device in devices
        )
        near = sorted(starts, key=lambda at: abs(at - moment))[: round(breadth.ops)]
        everything = Window.of_all(incumbent)
        begin, end = (everything.begin, everything.end) if len(near) == len(starts) else (min(near), max(near) + 1)
        return Window(begin, end, devices if breadth.devices < len(self.problem.devices) else None)

    def _idle(self, incumbent: GridSchedule) -> Iterator[tuple[int, int, int]]:
        """Device, begin and end of every time at which a device computes nothing, and which counts."""
        latest = max(incumbent.delivery)
        reached = [latest - delivery for delivery in incumbent.delivery]  # with the span a device's start is its own
        compute = [(at, x) for x, at in incumbent.start.items() if x.kind in COMPUTE]
        runs = sorted((at, at + self.grid.duration(x), self.problem.stages[x.stage].device) for at, x in compute)
        ends = [(incumbent.end - delivery,) * 2 + (d,) for d, delivery in enumerate(incumbent.delivery)]
        for begin, end, device in [*runs, *ends]:
            if begin > reached[device]:
                yield device, reached[device], begin
            reached[device] = max(reached[device], end)


def improve(request: Request, emit: Emit) -> float | None:
    """Run the engine. Returns the seconds used by its own count of work."""
    incumbents, clock = Incumbents.of_engine(request, emit, is_expressible), Clock.for_request(request)
    if start := ensure_start(incumbents):
        choice = choice_for(request.problem)
        for schedule in improvements(choice, start, clock, request.threads, request.seed, request.objective):
            incumbents.offer(schedule)
    return clock.spent_s


@lru_cache(maxsize=1)
def choice_for(problem: Problem) -> WindowChoice:
    """With what earlier runs in this process have learnt from their windows of the problem."""
    return WindowChoice(Grid.for_problem(problem))


def improvements(
    choice: WindowChoice, schedule: Schedule, clock: Clock, threads: int, seed: int, objective: Objective = "makespan"
) -> Iterator[Schedule]:
    """Yield shorter and shorter schedules, until time is up or a window of everything is solved."""
    grid, random_ = choice.grid, choice.random
    random_.seed(seed)
    incumbent = place_on_grid(grid, schedule, objective)
    while not clock.over:
        breadth, window = choice.window(incumbent)
        model = WindowModel(grid, incumbent, window, objective="ends")
        clock.count(len(incumbent.start), OPS_PER_S)
        answer = model.solve(clock, threads, random_.randrange(2**31), PATIENCE * choice.quick_s)
        is_whole, before = window == Window.of_all(incumbent), incumbent.length
        if answer.starts:
            compacted = prune(lift(grid.problem, grid.starts_ms(answer.starts), METHOD))
            candidate = place_on_grid(grid, compacted, objective)
            if candidate.length <= before:
                incumbent = candidate
                if candidate.length < before:
                    yield compacted
        choice.learn(breadth, grid.ms(before - incumbent.length), answer.used_s, answer.proven)
        if answer.proven and is_whole and (objective == "makespan" or incumbent.length == before):
            return
