"""The least length of a pipeline in which only one device has limits: a lower bound, found by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import without_evictions
from optpipe_solver.bounds.length import Measure, measures, shortest_paths, shortest_times
from optpipe_solver.bounds.stage_bytes import StageBytes, stage_bytes
from optpipe_solver.relax import one_stage, several_stages
from optpipe_solver.relax.layout import DONE, FULL, QUEUES, Known, OneStage
from optpipe_solver.relax.queues import Trip

ROWS = 2**20  # states of one device
CELLS = 2**25  # their columns
BUCKETS = 2**20
POPS = 1_000  # states taken between two looks at the clock
MOST_MICROBATCHES = 512


def devices(problem: Problem) -> list[int]:
    """The devices that the search knows: those that micro-batches pass on one stage and one route, and those that they
    pass on several stages of one route where all activations stay."""
    if problem.overlap_factor is not None or problem.microbatches > MOST_MICROBATCHES:
        return []
    problem = without_evictions(problem)
    return [d for d, passes in enumerate(_passes(problem)) if len(passes) == 1 or _all_stay(problem, passes)]


def _passes(problem: Problem) -> list[list[tuple[int, int]]]:
    """By device the routes and stages that micro-batches pass there."""
    found: list[list[tuple[int, int]]] = [[] for _ in problem.devices]
    for r, s in shortest_paths(problem).round_trip:
        found[problem.stages[s].device].append((r, s))
    return found


def _all_stay(problem: Problem, passes: list[tuple[int, int]]) -> bool:
    """Whether these are passes on one route, from which no activation can leave or be computed again."""
    stages = [problem.stages[s] for _, s in passes]
    return len({r for r, _ in passes}) == 1 and not any(stage.can_offload or stage.can_recompute for stage in stages)


def bounds(problem: Problem, d: int, objective: Objective = "makespan", rows: int = ROWS) -> Iterator[float]:
    """Yield rising bounds in ms on a schedule's length, from device d alone.

    All other devices have ample memory and compute as many ops at a time as they like: they only take the least time
    from the end of an op here to the start of what needs it here. But some do one micro-batch after the other there
    (`Queue`). The last bound is what this pipeline takes, if `rows` states and `CELLS` suffice.
    """
    problem = without_evictions(problem)
    passes = _passes(problem)[d]
    m = int((problem.costs.route == passes[0][0]).sum())
    search: Callable[[Known, int], float]
    if len(passes) == 1:
        search = partial(one_stage.expand, _one_stage(problem, *passes[0], m, objective))
        same = one_stage.same(m)
    else:
        device = several_stages.of(problem, passes, m, objective)
        search, same = partial(several_stages.expand, device), several_stages.same(device)
    begins = float(shortest_paths(problem).arrives[d]) if objective == "makespan" else 0.0
    count, table = np.zeros(6, dtype=np.int64), np.full(BUCKETS, -1, dtype=np.int64)
    begin, chain, heap = (np.empty(rows, dtype=np.int64) for _ in range(3))
    known = Known(np.empty(CELLS), begin, np.empty(rows), chain, table, heap, same, count)
    while not (count[DONE] or count[FULL]):
        least = float(search(known, POPS))
        if least == np.inf:  # no schedule fits
            return
        yield begins + least


def _one_stage(problem: Problem, r: int, s: int, m: int, objective: Objective) -> OneStage:
    paths, ms, held, stage = (
        shortest_paths(problem),
        shortest_times(problem),
        stage_bytes(problem)[s],
        problem.stages[s],
    )
    way = max(0.0, paths.round_trip[r, s] - float(ms[Kind.F, s] + ms[Kind.B, s]))
    rest = paths.after[r, s] if objective == "makespan" else float(ms[Kind.W, s])
    times = np.array([*ms[[Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R], s], way, rest])
    lines = (1 if problem.transfer_mode == "half_duplex" else 2) if stage.can_offload else 0
    memory = problem.devices[stage.device].activation_budget_bytes
    parts = sorted(held.parts, reverse=True) if stage.can_offload else []
    present = np.array([held.stays - gone for gone in accumulate(parts, initial=0)][::-1], dtype=np.int64)
    size = [memory, held.forward, held.recompute, held.backward, held.checkpoint, held.waiting, held.weight]
    shares, worth, less = _worth(measures(memory, [held]), held, present, times, again=stage.can_recompute)
    rules = np.array([m, lines, stage.can_recompute], dtype=np.int64)
    return OneStage(times, _queues(problem, r, s), rules, np.array(size, dtype=np.int64), present, shares, worth, less)


def _queues(problem: Problem, r: int, s: int) -> Floats:
    """Return `queues` of `expand`: the device that takes longest for one micro-batch, and the one with most work."""
    at, last = problem.all_routes[r].index(s), 2 * len(problem.all_routes[r]) - 1
    found = Trip(problem, r).queues(at, last - at)
    chosen = {max(found), max(found, key=lambda queue: queue[::-1])} if found else set()
    return np.array([*sorted(chosen), *[(0.0, 0.0)] * QUEUES][:QUEUES])


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
