"""How long a schedule takes when op times vary: a percentile of its length, by simulation.

Each op takes its nominal time times 1 + jitter·z, where z is standard normal. z is cut at both ends, so that no time is
negative and the mean stays the nominal time. The noise depends on the op (kind, stage, micro-batch, part), not on its
place in a program. So all schedules of one problem and seed are compared under the same noise. Memory follows from the
programs alone, so noise does not change it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.graph import durations, nominal_ms
from optpipe.evaluate.objective import Objective
from optpipe.evaluate.rows import Index, Rows
from optpipe.evaluate.timeline import timed_samples
from optpipe.model.arrays import Floats
from optpipe.model.ops import MARKS, TRANSFERS, Kind
from optpipe.model.problem import Problem

PERCENTILE = 95.0
CUT = 3.0  # in standard deviations
POSITIVE = 0.99  # noise shortens an op by no more than this share of its time
MOST_SAMPLES, FEWEST_SAMPLES = 400, 50
WORK = 2**20  # samples × passes of a micro-batch through a stage × parts of its activation: about a second


class Noise:
    """The noise of one problem's ops: the same for every schedule of it.

    Parameters
    ----------
    jitter
        The standard deviation of an op's time, as a share of it.
    seed
        Of the random numbers.
    """

    def __init__(self, problem: Problem, jitter: float, seed: int = 0) -> None:
        passes = sum(len(problem.route(j)) for j in range(problem.microbatches))
        self.problem, self.jitter, self.seed = problem, jitter, seed
        drawn = max(1, passes * int(problem.costs.parts.max()))
        self.samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES, WORK // drawn))
        self._factors = cache(self._draw)

    def percentile_ms(self, schedule: CompiledSchedule, objective: Objective = "makespan") -> float:
        """The 95th percentile of the objective over all samples, in ms.

        Raises ScheduleError if the schedule cannot be simulated, such as DeadlockError if ops wait for each other.
        """
        return float(np.percentile(self.lengths_ms(schedule, objective), PERCENTILE))

    def lengths_ms(self, schedule: CompiledSchedule, objective: Objective = "makespan") -> Floats:
        """(samples,) the objective under each sample of the noise, in ms."""
        rows = schedule.timeline.rows  # raises for a schedule that cannot run
        start, end = self.times(schedule)
        lasting = ~rows.of_kinds(*MARKS)
        together = [slice(None)]
        if objective == "span":
            together = [lasting & (rows.device == d) for d in np.unique(rows.device[lasting])]
        lengths: Floats = np.max([end[group].max(axis=0) - start[group].min(axis=0) for group in together], axis=0)
        return lengths

    def durations_ms(self, rows: Rows) -> Floats:
        """(n, samples) each op's time; a pair's stands on its first op."""
        factor = np.ones((len(rows), self.samples))
        for kind in np.unique(rows.kind).tolist():
            of_kind = np.flatnonzero(rows.kind == kind)
            part = rows.part[of_kind] if kind in TRANSFERS else 0
            factor[of_kind] = self._factors(kind)[rows.stage[of_kind], rows.microbatch[of_kind], part]
        nominal = nominal_ms(self.problem, rows, Index(self.problem, rows))
        return durations(self.problem, rows, nominal[:, None] * factor)

    def _draw(self, kind: Kind) -> Floats:
        """(S, m, parts, samples) the factors on the nominal times of this kind's ops."""
        parts = int(self.problem.costs.parts.max()) if kind in TRANSFERS else 1
        shape = (len(self.problem.stages), self.problem.microbatches, parts, self.samples)
        cut = min(CUT, POSITIVE / self.jitter) if self.jitter else CUT
        z = np.random.default_rng((self.seed, kind)).standard_normal(shape)
        factors: Floats = 1.0 + self.jitter * np.clip(z, -cut, cut)
        return factors

    def times(self, schedule: CompiledSchedule) -> tuple[Floats, Floats]:
        """The start and the end of every op in ms, (n, samples) each. The schedule must be free of deadlocks."""
        rows, (waits, delay) = schedule.rows, schedule.waits
        return timed_samples(rows, waits, delay[:, :, None], self.durations_ms(rows))
