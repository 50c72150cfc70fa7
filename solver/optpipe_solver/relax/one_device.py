"""The least length of a pipeline in which only one device has limits: a lower bound, found by search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import without_evictions
from optpipe_solver.bounds.length import Measure, measures, shortest_paths, shortest_times
from optpipe_solver.bounds.stage_bytes import StageBytes, stage_bytes
from optpipe_solver.relax.states import DONE, FIRST, FULL, expand

ROWS = 300_000  # states of one device
BUCKETS = 2**18
POPS = 1_000  # states taken between two looks at the clock
MOST_MICROBATCHES = 64


def devices(problem: Problem) -> list[int]:
    """The devices that the search knows: those that micro-batches pass on one stage and one route."""
    if problem.overlap_factor is not None or problem.microbatches > MOST_MICROBATCHES:
        return []
    return [d for d, passes in enumerate(_passes(problem)) if len(passes) == 1]


def _passes(problem: Problem) -> list[list[tuple[int, int]]]:
    """By device the routes and stages that micro-batches pass there."""
    found: list[list[tuple[int, int]]] = [[] for _ in problem.devices]
    for r, s in shortest_paths(problem).round_trip:
        found[problem.stages[s].device].append((r, s))
    return found


def bounds(problem: Problem, d: int, objective: Objective = "makespan", rows: int = ROWS) -> Iterator[float]:
    """Yield rising bounds in ms on a schedule's length, from device d alone.

    All other devices have ample memory and compute as many ops at a time as they like: they only take the least time
    from the end of a forward here to the start of its input gradient. The last bound is what this pipeline takes,
    if `rows` states suffice.
    """
    problem = without_evictions(problem)
    ((r, s),) = _passes(problem)[d]
    paths, ms, held, stage = (
        shortest_paths(problem),
        shortest_times(problem),
        stage_bytes(problem)[s],
        problem.stages[s],
    )
    way = max(0.0, paths.round_trip[r, s] - float(ms[Kind.F, s] + ms[Kind.B, s]))
    begins, rest = 0.0, float(ms[Kind.W, s])  # of its span
    if objective == "makespan":
        begins, rest = float(paths.arrives[d]), float(paths.leaves[d])
    times = np.array([*ms[[Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R], s], way, rest])
    m = int((problem.costs.route == r).sum())
    lines = (1 if problem.transfer_mode == "half_duplex" else 2) if stage.can_offload else 0
    memory = problem.devices[d].activation_budget_bytes
    parts = sorted(held.parts, reverse=True) if stage.can_offload else []
    present = np.array([held.stays - gone for gone in accumulate(parts, initial=0)][::-1], dtype=np.int64)
    size = [memory, held.forward, held.recompute, held.backward, held.checkpoint, held.waiting]
    shares, worth, less = _worth(measures(memory, [held]), held, present, times, again=stage.can_recompute)
    states = np.empty((rows, FIRST + 2 * m))
    search = (
        times,
        np.array([m, lines, stage.can_recompute], dtype=np.int64),
        np.array(size, dtype=np.int64),
        present,
        shares,
        worth,
        less,
        states,
        np.empty(rows),
        np.empty(rows, dtype=np.int64),
        np.full(BUCKETS, -1, dtype=np.int64),
        np.empty(rows, dtype=np.int64),
        count := np.zeros(5, dtype=np.int64),
    )
    while not (count[DONE] or count[FULL]):
        least = float(expand(*search, POPS))
        if least == np.inf:  # no schedule fits
            return
        yield begins + least


def _worth(
    each: list[Measure], held: StageBytes, present: np.ndarray, ms: Floats, *, again: bool
) -> tuple[Floats, Floats, Floats]:
    """Return `shares`, `worth` and `less` of `expand`: for each measure of sizes, and once more for bytes without what
    waits for weight gradients."""
    n, carry, way = len(present) - 1, float(ms[4] + ms[5]), float(ms[6])
    shares, worth, less = [], [], []
    for number, measure in enumerate([each[0], *each]):
        values = [measure(int(size)) for size in present]
        weight = measure(held.weight) if number else 0.0
        alone = 1.0 if measure(max(held.waiting, held.weight)) else measure(held.most)
        shares.append(
            [
                measure(held.forward),
                measure(held.recompute),
                measure(held.backward),
                weight,
                measure(held.checkpoint),
                alone,
            ]
        )
        worth.append(values)
        saved = [
            values[n] * way
            - sum(values[n - i] * carry for i in range(gone))
            - values[n - gone] * max(0.0, way - gone * carry)
            for gone in range(n + 1)
        ]
        computed = values[n] * way - shares[-1][1] * ms[3] - shares[-1][4] * max(0.0, way - ms[3]) if again else 0.0
        less.append([*_falling(saved), max(0.0, computed)])
    return np.array(shares), np.array(worth), np.array(less)


def _falling(total: list[float]) -> list[float]:
    """The steps of the least concave function above these totals, from 0 on; none is negative."""
    steps, at = [], 0
    while at < len(total) - 1:
        slope, to = max(((total[k] - total[at]) / (k - at), k) for k in range(at + 1, len(total)))
        steps += [max(0.0, slope)] * (to - at)
        at = to
    return steps
