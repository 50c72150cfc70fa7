"""The engine for noisy op times: local search on programs by the percentile that simulation gives
(`optpipe.evaluate.jitter`).

A move is one of job-shop scheduling (van Laarhoven et al. 1992): on the critical path of a bad sample of the noise, two
ops that follow each other for no other reason than a program's order change places. The search draws other noise than
what the portfolio judges by, so what it finds has not merely learnt the samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optpipe.errors import OptPipeError
from optpipe.evaluate.graph import ISSUED
from optpipe.evaluate.jitter import PERCENTILE, Noise
from optpipe.evaluate.objective import length_ms, shorter
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, MICROBATCH, STAGE, Program
from optpipe.process.protocol import Frame, Incumbent, Programs, Ready, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule, check

METHOD = "robust"
MOST_THREADS: int | None = 1
OPEN_ENDED = True
OTHER_NOISE = 1_000_003  # added to the seed
OPS_PER_S = 1.5e7  # ops times samples simulated in a second, about half of what a quiet machine does
LONGER = 1.01  # the nominal time may become this times as long as at the start
WORSE = 1.001  # the schedule at hand may be this times as long as the best (record-to-record travel, Dueck 1993)


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    return None if problem.microbatches > 1 else "with one micro-batch there is no order to change"


def run(request: Request, emit: Callable[[Frame], None]) -> float:
    """Emits each schedule that is better by the engine's own noise, from the warm start on, until time is up.

    Returns the seconds used by its own count of simulated ops. These are what is limited, so that the search is the
    same on a busy machine.
    """
    if request.warm_start is None:
        return 0.0
    emit(Ready())
    search = LocalSearch(request, request.warm_start.schedule(request.problem, METHOD))
    while search.spent_s < request.time_limit_s:
        if search.step():
            emit(Incumbent(method=METHOD, schedule=Programs.from_schedule(search.schedule)))
    return search.spent_s


class LocalSearch:
    """The schedule at hand, and moves from it."""

    def __init__(self, request: Request, schedule: Schedule) -> None:
        self.problem, self.objective = request.problem, request.objective
        self.noise = Noise(request.problem, request.jitter, (request.seed + OTHER_NOISE) % 2**31)
        self.random = random.Random(request.seed)
        self.spent_s = 0.0
        self._take(schedule)
        pruned = prune(schedule)
        if self.noise.percentile_ms(pruned.compiled, self.objective) <= self.ms:
            self._take(pruned)
        self.longest_ms = LONGER * length_ms(self.schedule, self.objective)
        self.best_ms = self.ms

    def _take(self, schedule: Schedule) -> None:
        lengths = self.noise.lengths_ms(schedule.compiled, self.objective)
        self.schedule, self.ms = schedule, float(np.percentile(lengths, PERCENTILE))
        self.bad = np.flatnonzero(lengths >= np.percentile(lengths, 2 * PERCENTILE - 100)).tolist()
        self.start, self.end = self.noise.times(schedule.compiled)
        self.arcs: list[tuple[int, int]] = []

    def step(self) -> bool:
        """Tries one neighbour, and takes it if it is hardly worse than the best. Returns whether it is the best."""
        ops = len(self.end)
        self.spent_s += ops / OPS_PER_S
        if not self.arcs:
            self.spent_s += ops * self.noise.samples / OPS_PER_S
            self.arcs = self._arcs(self.random.choice(self.bad))
            self.random.shuffle(self.arcs)
            if not self.arcs:
                return False
        neighbour = self._neighbour(*self.arcs.pop())
        if neighbour is None:
            return False
        try:
            if length_ms(neighbour, self.objective) > self.longest_ms:
                return False
            self.spent_s += ops * self.noise.samples / OPS_PER_S
            ms = self.noise.percentile_ms(neighbour.compiled, self.objective)
        except OptPipeError:  # ops wait for each other
            return False
        if ms > WORSE * self.best_ms or check(self.problem, neighbour):
            return False
        self._take(neighbour)
        better = shorter(ms, self.best_ms)
        self.best_ms = min(ms, self.best_ms)
        return better

    def _arcs(self, sample: int) -> list[tuple[int, int]]:
        """Pairs of rows on a critical path of the sample that follow each other only by their program's order."""
        device, start, end = self.schedule.timeline.device, self.start[:, sample], self.end[:, sample]
        waits, delay = self.schedule.compiled.waits
        ready = np.where(waits >= 0, end[waits] + delay, -1.0)
        by_order = (ISSUED, waits.shape[1] - 1)
        arcs = []
        counts = np.ones_like(device, dtype=np.bool_)  # whether the row's end may be the length
        if self.objective == "span":
            spans = {d: end[device == d].max() - start[device == d].min() for d in set(device.tolist())}
            counts = device == max(spans, key=spans.__getitem__)
        row = int(np.where(counts, end, -1.0).argmax())
        while row >= 0:
            column = int(ready[row].argmax())
            last = int(waits[row, column])
            if last >= 0 and column in by_order and device[last] == device[row]:
                arcs.append((last, row))
            row = last
        return arcs

    def _neighbour(self, first: int, second: int) -> Schedule | None:
        """The schedule with the second op before the first, or the first after the second; None if one waits for the
        other."""
        device = self.schedule.timeline.device
        d = int(device[first])
        offset = int(np.searchsorted(device, d))
        table = self.schedule.programs[d].table
        source, target = (
            (second - offset, first - offset) if self.random.random() < 0.5 else (first - offset, second - offset)
        )
        low, high = min(source, target), max(source, target)
        passed = np.delete(table[low : high + 1], source - low, axis=0)
        moved = table[source]
        if table[max(0, low - 1) : high + 1, JOINED].any():
            return None
        if ((passed[:, STAGE] == moved[STAGE]) & (passed[:, MICROBATCH] == moved[MICROBATCH])).any():
            return None
        programs = list(self.schedule.programs)
        programs[d] = Program(np.insert(np.delete(table, source, axis=0), target, moved, axis=0))
        return replace(self.schedule, programs=tuple(programs))
