"""A lower bound by what memory lets a device compute while micro-batches are on their way on others: soon after the
start, when none has come back, and shortly before the end, when none is left to begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver import tuning
from optpipe_solver.bounds.problem_facts import Paths, shortest_paths, stage_bytes, without_evictions


class Steps(NamedTuple):
    """What equal micro-batches do on a device: forwards on the way there, input gradients on the way back, 2c steps.

    Between two steps a micro-batch is on other devices, which only take time.
    """

    microbatches: int
    ms: Floats  # (2c,) of each step
    begins_ms: Floats  # (2c,) until the first micro-batch can start each step
    to_end_ms: Floats  # (2c,) from the start of each step to the end of all, at least
    weight_ms: Floats  # (c,) of the weight gradient that follows each input gradient
    held: Ints  # (2c + 1,) bytes of a micro-batch before each step, and after the last one, at least
    waiting: Ints  # (c,) bytes from each input gradient to the end of its weight gradient, at least

    @property
    def done_ms(self) -> Floats:
        """(2c + 1,) of the steps before each one, each input gradient with its weight gradient."""
        weights = np.concatenate((np.zeros(len(self.weight_ms)), self.weight_ms))
        return np.concatenate(([0.0], np.cumsum(self.ms + weights)))

    @property
    def prices(self) -> Floats:
        """ms for a byte at which two states of a micro-batch are worth the same; some, if there are many."""
        gained, freed = (each[:, None] - each for each in (self.done_ms, self.held))
        frees, weighs = freed > 0, self.waiting > 0
        prices = abs(gained[frees]) / freed[frees], self.weight_ms[weighs] / self.waiting[weighs]
        different: Floats = np.unique(np.concatenate(prices).astype(np.float32)).astype(float)
        return different[:: len(different) // tuning.RAMP_PRICES + 1]


def steps_on(problem: Problem, d: int, paths: Paths, objective: Objective) -> list[Steps]:
    """Return the steps on device d of each class of equal micro-batches that passes it.

    For the span, time begins with the first op on the device, and ends with its last.
    """
    classes = []
    for j in dict.fromkeys(j for j, _ in paths.passes[d]):
        stages = [s for each, s in paths.passes[d] if each == j]
        c, ms, held = len(stages), paths.ms[j], stage_bytes(problem, j)
        reaches, trips = (np.array([table[j, s] for s in stages]) for table in (paths.reaches, paths.round_trip))
        step_ms = np.array([*ms[Kind.F, stages], *ms[Kind.B, stages[::-1]]])
        begins = np.concatenate((reaches, (reaches + trips)[::-1] - step_ms[c:]))
        tail = paths.after[j, stages[0]] if objective == "makespan" else float(ms[Kind.W, stages[0]])
        least = np.array([held[s].least() for s in stages])
        # (2c + 1, c) whether each activation is there: from the end of its forward, step k, to the start of its
        # backward, step 2c - 1 - k.
        there = np.array([[k < step <= 2 * c - 1 - k for k in range(c)] for step in range(2 * c + 1)])
        classes.append(
            Steps(
                microbatches=paths.passing[j],
                ms=step_ms,
                begins_ms=begins - (begins[0] if objective == "span" else 0.0),
                to_end_ms=begins[-1] + step_ms[-1] - begins + tail,
                weight_ms=ms[Kind.W, stages[::-1]],
                held=there @ least,
                waiting=np.array([min(held[s].waiting, held[s].weight) for s in stages[::-1]]),
            )
        )
    return classes


def ramp_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule that fits falls below.

    Let t ms have passed, and micro-batch i have done k_i of its steps on a device, or be at the last of them.

    1. The device holds the sum of held(k_i) at least, which fits into its memory M: activations between their forward
       and their input gradient, at the fewest bytes that the problem allows.
    2. Step k_i has begun by then. The i-th micro-batch that enters starts no sooner than i forwards after the first
       one, and from step to step it takes at least the time that other devices need for it: so k_i is at most K_i.
    3. The device has computed the sum of done(k_i) at most: these steps, each input gradient with its weight gradient.
    4. For any price x ≥ 0 of a byte, by 1, that is at most x·M + sum of (done(k_i) - x·held(k_i)), and so at most
       x·M + the sum over i of the largest done(k) - x·held(k) with k ≤ K_i (a Lagrangian relaxation). The least of it
       over some prices is work(t).
    5. So the device was idle for t - work(t) ms by then.

    The same holds backwards in time, u ms before the end, for what is left to compute; there, weight gradients may
    wait and hold memory, too. A schedule takes the work of a device, what it is idle in its first t ms, and what it is
    idle in its last u: both together where the work fills t + u at least, so that the two do not overlap; else one of
    them. Classes of unequal micro-batches add up in 4, each as if it entered alone.
    """
    problem = without_evictions(problem)
    paths = shortest_paths(problem)
    bound = 0.0
    for d in np.flatnonzero(paths.used).tolist():
        classes, memory = steps_on(problem, d, paths, objective), problem.devices[d].activation_budget_bytes
        work_ms = sum(each.microbatches * float(each.done_ms[-1]) for each in classes)
        start, end = idle_after_start(classes, memory), idle_before_end(classes, memory)
        within, idle = start[:, None] + end, np.maximum(start[:, None], end)
        longest = np.where(within[..., 0] <= work_ms, within[..., 1], idle[..., 1] * (idle[..., 0] <= work_ms))
        bound = max(bound, work_ms + float(longest.max()))
    return bound


def idle_after_start(classes: list[Steps], memory: int) -> Floats:
    """(n, 2) moments in ms after the start, and how long a device was idle by then, at least."""
    prices = _prices(classes)
    moments = _moments(np.concatenate([each.begins_ms for each in classes]))
    return np.array([(t, t - done_by(classes, memory, t, prices).min()) for t in moments])


def idle_before_end(classes: list[Steps], memory: int) -> Floats:
    """(n, 2) moments in ms before the end, and how long a device is idle from then on, at least."""
    prices = _prices(classes)
    moments = _moments(np.concatenate([each.to_end_ms - each.ms for each in classes]))
    moments *= 1 - 1e-9  # just after the moment to which a step may have run
    return np.array([(u, u - left_at(classes, memory, u, prices).min()) for u in moments])


def _moments(at: Floats) -> Floats:
    """These, and others up to the last of them."""
    return np.unique(np.concatenate((at, np.linspace(0.0, at.max(), tuning.RAMP_MOMENTS))))


def _prices(classes: list[Steps]) -> Floats:
    return np.unique(np.concatenate([[0.0], *(each.prices for each in classes)]))


def done_by(classes: list[Steps], memory: int, t: float, prices: Floats) -> Floats:
    """(prices,) ms that a device has computed t ms after the start, at most."""
    work = prices * memory
    for each in classes:
        starts = each.begins_ms[0] + np.arange(each.microbatches) * each.ms[0]
        begun = np.searchsorted(each.begins_ms - each.begins_ms[0], t - starts)
        value = np.maximum.accumulate(each.done_ms - prices[:, None] * each.held, axis=1)
        work = work + value @ np.bincount(begun, minlength=len(each.held))
    return np.minimum(work, t)


def left_at(classes: list[Steps], memory: int, u: float, prices: Floats) -> Floats:
    """(prices,) ms that a device has still to compute u ms before the end, at most."""
    work = prices * memory
    for each in classes:
        c, done = len(each.weight_ms), each.done_ms
        # Of a micro-batch before each step: weight gradients that wait where they are worth their memory.
        waits = np.maximum(0.0, each.weight_ms - prices[:, None] * each.waiting)
        waiting = np.concatenate((np.zeros((len(prices), c + 1)), np.cumsum(waits, axis=1)), axis=1)
        value = done[-1] - done - prices[:, None] * each.held + waiting
        ends = (each.to_end_ms - each.ms)[::-1]  # after the step that may run, from the last one on
        not_done = np.searchsorted(ends, u - np.arange(each.microbatches) * each.ms[-1], side="right")
        value = np.maximum.accumulate(value[:, ::-1], axis=1)
        work = work + value @ np.bincount(not_done, minlength=len(each.held))
    return np.minimum(work, u)
