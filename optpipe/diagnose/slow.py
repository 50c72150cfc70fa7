"""Which devices are slower than others with the same work, and since when.

The work of a micro-batch is what its faster stages say. A stage's usual time for it is that of the faster ones of all
micro-batches with about as much work, in all runs: as they are long, attention grows faster than the rest of a stage.
A device's excess in a run is what its micro-batches take beyond that. So a stage that is long in all replicas is no
slow device, nor is a replica whose micro-batches are all long. With one replica, only a device that becomes slower can
be told from a long stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.diagnose.runs import Runs
from optpipe.model.arrays import Floats, Ints

LEAST = 0.05  # of its time a device must take more
CLEAR = 4.0  # times the usual spread, too
FEWEST = 3  # steps, or half of them
FAST = 0.25  # the quantile of a stage's times that counts as its usual time
ALIKE, MOST_GROUPS = 50, 20  # micro-batches with about as much work that are compared, and into how many groups at most
ROUNDS = 5
DEVIATION = 1.4826  # of a normal distribution, for a median of absolute deviations


class SlowDevice(NamedTuple):
    """A device of a replica that is slower than others with the same work.

    Attributes
    ----------
    replica, device
        Where it is.
    first_step, last_step
        The steps between which it is.
    since
        Whether it was not slow before `first_step`.
    factor
        How many times longer its ops take, the median of these steps.
    """

    replica: int
    device: int
    first_step: int
    last_step: int
    since: bool
    factor: float


def find_slow_devices(runs: Runs) -> tuple[list[SlowDevice], Floats]:
    """The slow devices, the slowest first, and (T,) the share of each op's time that is left without them."""
    excess = excess_of(runs)  # (K, D), logarithms
    spread = DEVIATION * float(np.median(np.abs(excess - np.median(excess))))
    least = max(np.log1p(LEAST), CLEAR * spread)
    left = np.ones(len(runs.ms))
    slow = []
    for replica in runs.replicas.tolist():
        of_replica = np.flatnonzero(runs.replica == replica)
        of_replica = of_replica[np.argsort(runs.step[of_replica])]
        for device in range(runs.devices):
            over = excess[of_replica, device]
            first, last = _longest_phase(over - least)
            enough = min(FEWEST, -(-len(over) // 2))
            if last - first < enough or np.median(over[first:last]) <= least:
                continue
            phase = of_replica[first:last]
            factors = np.ones(len(runs.step))
            factors[phase] = np.exp(np.maximum(0.0, over[first:last]))
            left /= np.where(runs.device == device, factors[runs.run], 1.0)
            steps = runs.step[phase]
            median = float(np.exp(np.median(over[first:last])))
            slow.append(SlowDevice(replica, device, int(steps[0]), int(steps[-1]), first > 0, median))
    return sorted(slow, key=lambda each: -each.factor), left


def excess_of(runs: Runs) -> Floats:
    """(K, D) by how much longer a device takes than its stages and its run's work say, as a logarithm."""
    stages, key = len(runs.where), runs.run * (int(runs.microbatch.max()) + 1) + runs.microbatch
    microbatches, number = np.unique(key, return_inverse=True)
    totals = np.zeros((len(microbatches), stages))
    np.add.at(totals, (number, runs.stage), runs.ms)
    log = np.log(np.maximum(totals, np.finfo(float).tiny))
    usual = np.broadcast_to(np.quantile(log, FAST, axis=0), log.shape)
    groups: list[Ints] = [np.arange(len(log))]
    for _ in range(ROUNDS):
        work = np.sort(log - usual, axis=1)[:, (stages - 1) // 2]
        usual = np.empty_like(log)
        for alike in groups:
            usual[alike] = np.quantile(log[alike] - work[alike, None], FAST, axis=0)
        # Where works differ by less than what is looked for, their order is noise.
        wanted = min(MOST_GROUPS, len(log) // ALIKE, int(np.diff(np.quantile(work, (0.05, 0.95)))[0] / LEAST))
        groups = np.array_split(np.argsort(work, kind="stable"), max(1, wanted))
    excess = log - usual - work[:, None]
    run = np.empty(len(microbatches), np.int64)
    run[number] = runs.run
    of_runs = np.split(excess, np.flatnonzero(np.diff(run)) + 1)
    of_stages = np.array([np.median(of_run, axis=0) for of_run in of_runs])
    on = [[s for s, device in enumerate(runs.where) if device == d] for d in range(runs.devices)]
    return np.column_stack([np.median(of_stages[:, stages], axis=1) for stages in on])


def _longest_phase(over: Floats) -> tuple[int, int]:
    """The begin and the end of the part whose sum is largest (Kadane); (0, 0) if no sum is positive."""
    best, total, begin, phase = 0.0, 0.0, 0, (0, 0)
    for n, each in enumerate(over.tolist()):
        if total <= 0:
            total, begin = 0.0, n
        total += each
        if total > best:
            best, phase = total, (begin, n + 1)
    return phase
