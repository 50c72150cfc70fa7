"""Robustness by simulation: a percentile of a schedule's length when op times are noisy.

Each timed op lasts its nominal time times 1 + jitter·z, z standard normal, cut at both ends alike so that no time is
negative and the mean stays the nominal time. The noise belongs to an op's identity (kind, stage, micro-batch, part),
not to its place in a program: schedules of one problem and seed are compared under the same noise. Memory is a property
of the programs (`optpipe.evaluate.memory`), so noise cannot break it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from optpipe.evaluate.graph import ACROSS, Flags, Floats, Ints, Table, dependencies, flatten, second_of_pair, streams
from optpipe.evaluate.jit import LazyJit
from optpipe.evaluate.timeline import longest_path
from optpipe.model.ops import MARKS, TRANSFERS, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe.process.child import Objective
from optpipe.schedule import Schedule

PERCENTILE = 95.0
CUT = 3.0  # standard deviations
POSITIVE = 0.99  # noise takes no more than this share of an op's time
MOST_SAMPLES, FEWEST_SAMPLES = 400, 50
WORK = 2**20  # passes of a micro-batch through a stage that all samples together may have: about a second

_longest_path = LazyJit(longest_path)


def percentile_ms(schedule: Schedule, jitter: float, objective: Objective = "makespan", seed: int = 0) -> float:
    """The 95th percentile of the objective, in ms, where op times vary by the share `jitter` (standard deviation).

    Raises `ScheduleError` and `DeadlockError` as `simulate`. For many schedules of one problem keep a `Noise`.
    """
    return Noise(schedule.problem, jitter, seed).percentile_ms(schedule, objective)


class Noise:
    """The noise of one problem's ops: the same for every schedule of it."""

    def __init__(self, problem: Problem, jitter: float, seed: int = 0) -> None:
        passes = sum(len(problem.route(j)) for j in range(problem.microbatches))
        self.problem, self.jitter, self.seed = problem, jitter, seed
        self.samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES, WORK // max(1, passes)))
        self._factors = cache(self._draw)

    def percentile_ms(self, schedule: Schedule, objective: Objective = "makespan") -> float:
        return float(np.percentile(self.lengths_ms(schedule, objective), PERCENTILE))

    def lengths_ms(self, schedule: Schedule, objective: Objective = "makespan") -> Floats:
        """(samples,) the objective under each sample of the noise, in ms."""
        device = schedule.timeline.device  # raises for a schedule that cannot run
        start, end = self.times(schedule)
        lasting = ~of_kinds(schedule.timeline.table, *MARKS)
        together = (
            [lasting & (device == d) for d in np.unique(device[lasting])] if objective == "span" else [slice(None)]
        )
        lengths: Floats = np.max([end[own].max(axis=0) - start[own].min(axis=0) for own in together], axis=0)
        return lengths

    def durations(self, table: Table) -> Floats:
        """(n, samples) each op's time; a pair's stands on its first op."""
        factor = np.ones((len(table), self.samples))
        for kind in np.unique(table[:, KIND]).tolist():
            rows = np.flatnonzero(table[:, KIND] == kind)
            part = table[rows, PART] if kind in TRANSFERS else 0
            factor[rows] = self._factors(kind)[table[rows, STAGE], table[rows, MICROBATCH], part]
        ms: Floats = self.problem.costs.ms[table[:, KIND], table[:, STAGE], None] * factor
        first = np.flatnonzero(table[:, JOINED] == 1)
        ms[first] = (self.problem.overlap_factor or 1.0) * (ms[first] + ms[first + 1])
        return ms

    def _draw(self, kind: Kind) -> Floats:
        """(S, m, parts, samples) what the times of this kind's ops are multiplied with."""
        parts = int(self.problem.costs.parts.max()) if kind in TRANSFERS else 1
        shape = (len(self.problem.stages), self.problem.microbatches, parts, self.samples)
        cut = min(CUT, POSITIVE / self.jitter) if self.jitter else CUT
        z = np.random.default_rng((self.seed, kind)).standard_normal(shape)
        factors: Floats = 1.0 + self.jitter * np.clip(z, -cut, cut)
        return factors

    def times(self, schedule: Schedule) -> tuple[Floats, Floats]:
        """(n, samples) start and end of every op of a schedule that can run, device after device in program order, in
        ms."""
        table, _ = flatten(schedule)
        waits, delay = waits_for(self.problem, schedule)
        second = second_of_pair(table)
        duration = self.durations(table)
        start, end = (
            np.zeros_like(duration),
            np.zeros((len(table) + 1, self.samples)),
        )  # the last row: nothing to wait for
        delayed = [bool(column.any()) for column in delay.T]
        for rows in _levels(waits, ~second):
            begin = start[rows]
            for column in range(waits.shape[1]):
                ended = end[waits[rows, column]]
                if delayed[column]:
                    ended += delay[rows, column, None]
                np.maximum(begin, ended, out=begin)
            start[rows] = begin
            end[rows] = begin + duration[rows]
        start[second], end[:-1][second] = start[np.flatnonzero(second) - 1], end[np.flatnonzero(second) - 1]
        return start, end[:-1]


def waits_for(problem: Problem, schedule: Schedule) -> tuple[Ints, Floats]:
    """(n, k) the ops that each op waits for, -1 for none, and (n, k) how many ms ago they must have ended.

    The columns are those of `dependencies`, where there are pairs those of the second op on its first, and last the op
    before on the stream. A pair is its first op: who needs the second waits for the first.
    """
    table, device = flatten(schedule)
    needs, delay = dependencies(problem, table, device)
    order, begins = streams(problem, schedule, table, device)
    n = len(table)
    before = np.full((n, 1), -1)
    before[order[1:], 0] = order[:-1]
    before[order[np.unique(begins[begins < len(order)])], 0] = -1
    delays = np.zeros_like(needs, dtype=np.float64)
    delays[:, ACROSS] = delay
    first = np.flatnonzero(table[:, JOINED] == 1)
    if len(first):
        needs, delays = (
            np.concatenate([of, np.full_like(of, blank)], axis=1) for of, blank in ((needs, -1), (delays, 0))
        )
        needs[first, 4:], delays[first, 4:] = needs[first + 1, :4], delays[first + 1, :4]
        lead = np.arange(n) - second_of_pair(table)
        needs = np.where(needs >= 0, lead[needs], -1)
    return np.concatenate([needs, before], axis=1), np.concatenate([delays, np.zeros((n, 1))], axis=1)


def _levels(waits: Ints, leads: Flags) -> list[Ints]:
    """The ops that lead, in groups that wait for earlier ones only: by the longest path where each op takes one
    unit."""
    n = len(waits)
    order, none = np.flatnonzero(leads), np.zeros(n, dtype=np.bool_)
    depth, end, done = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.bool_)
    _longest_path(n, order, np.arange(len(order) + 1), waits, np.zeros(n), np.ones(n), none, depth, end, done)
    ranked = order[np.argsort(depth[order], kind="stable")]
    return np.split(ranked, np.flatnonzero(np.diff(depth[ranked])) + 1)
