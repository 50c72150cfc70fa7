"""Hypothesis strategies: problems that are small enough for their optimum to be found, and short of memory."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, each_microbatch
from support.oracles.enumeration import problem_of, stage
from support.problems.strategies import differing, problems


@st.composite
def problems_of_every_sort(
    draw: st.DrawFn, max_stages: int = 3, max_microbatches: int = 3, nodes: bool = False, **limits: int
) -> Problem:
    """As the core's strategy has them, without pairs, with memory and host memory that bind or do not; with `nodes`
    some devices share that."""
    problem = draw(problems(max_stages=max_stages, max_microbatches=max_microbatches, **limits))
    costs = problem.costs
    needs = np.maximum(costs.activation, costs.saved_for_weight).max(axis=1)
    devices = []
    for d, device in enumerate(problem.devices):
        need = int(needs[costs.device == d].sum())
        budget, host = need + draw(st.integers(0, 10)), draw(st.sampled_from([None, 0, need // 2, 2 * need]))
        limits = {"activation_budget_bytes": budget, "host_memory_bytes": host}
        node = draw(st.sampled_from([None, "a", "b"])) if nodes else None
        devices.append(device.model_copy(update={**limits, "node": node}))
    return problem.model_copy(update={"devices": tuple(devices), "overlap_factor": None})


@st.composite
def levels_of(draw: st.DrawFn, ms: st.SearchStrategy[int], size: int, parts: int) -> Any:
    """A level of recomputation: its time, its checkpoint's bytes, and the offload of that, if it can leave."""
    kept = draw(st.integers(0, size))
    moved = (draw(ms), draw(ms), kept // parts * parts) if kept >= parts and draw(st.booleans()) else None
    return draw(ms), kept, moved


@st.composite
def short_of_memory(draw: st.DrawFn, most_devices: int = 3, most_microbatches: int = 9) -> Problem:
    """One stage a device, each with costs of its own; activations stay, leave in parts or are computed again."""
    count = draw(st.integers(1, most_devices))
    stages, memory = [], []
    ms = st.sampled_from((0, 1, 2, 3, 5, 8, 13))
    for d in range(count):
        parts = draw(st.integers(1, 3))
        size = parts * draw(st.integers(1, 3))
        gone = parts * draw(st.integers(1, size // parts))
        away = (draw(ms), draw(ms), gone) if draw(st.integers(0, 2)) else None
        how = draw(st.integers(0, 3))
        again = (draw(ms), draw(st.integers(0, size))) if how == 0 else None
        levels = [draw(levels_of(ms, size, parts)) for _ in range(draw(st.integers(1, 2)))] if how == 1 else []
        kept = draw(st.integers(0, 2 * size))
        stages.append(stage(d, (draw(ms), draw(ms), draw(ms)), size, kept, away, again, parts, levels))
        memory.append(size + draw(st.integers(0, 2 * size)))
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    links = [{"link": draw(st.sampled_from((None, "bus")))} for _ in range(count)]
    m = draw(st.integers(2, most_microbatches))
    problem = problem_of(stages, memory, m, draw(st.sampled_from((0.0, 1.0))), transfer_mode=duplex, devices=links)
    return draw(differing(problem)) if m <= 4 and draw(st.booleans()) else problem


@st.composite
def several_a_device(draw: st.DrawFn, most_microbatches: int = 6) -> Problem:
    """Two or three stages a device, looped or V-shaped, alike or each with costs of its own; all activations stay."""
    devices, chunks = draw(st.sampled_from(((1, 2), (1, 3), (2, 2), (2, 3), (3, 2))))
    turns = draw(st.booleans())
    order = [d for k in range(chunks) for d in (range(devices)[::-1] if turns and k % 2 else range(devices))]
    ms, size = st.sampled_from((0, 1, 2, 3, 5, 8)), st.integers(1, 3)
    costs = st.tuples(st.tuples(ms, ms, ms), size, st.integers(0, 4))
    alike = draw(costs) if draw(st.booleans()) else None
    stages, need = [], [0] * devices
    for d in order:
        times, held, kept = alike or draw(costs)
        stages.append(stage(d, times, held, kept))
        need[d] += max(held, kept)
    memory = [size + draw(st.integers(0, 2 * size)) for size in need]
    return problem_of(stages, memory, draw(st.integers(2, most_microbatches)), draw(st.sampled_from((0.0, 1.0))))


@st.composite
def slow_one_way(draw: st.DrawFn) -> Problem:
    """Memory for one of two activations on the way to a far device: they leave and come back in times that
    differ much, or are computed again by one of two levels that do."""
    short, long = st.sampled_from((0, 1)), st.sampled_from((5, 8))
    unlike = st.tuples(short, long).flatmap(st.permutations)
    quick, far, size = st.integers(1, 2), st.sampled_from((3, 8, 13)), 2
    away = (*draw(unlike), size) if draw(st.booleans()) else None
    levels = [(ms, draw(st.integers(0, 1)), None) for ms in draw(unlike)] if not away else []
    held = stage(0, (draw(quick), draw(quick), draw(quick)), size, draw(st.integers(0, size)), away, levels=levels)
    plain = stage(1, (draw(quick), draw(quick), 0), 1)
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    return problem_of([held, plain], [size + draw(st.integers(0, 1)), 2], 2, float(draw(far)), transfer_mode=duplex)


@st.composite
def evicting_and_tiny(draw: st.DrawFn) -> Problem:
    """Two devices of which the first or the second may evict to the other, which has room for that or not."""
    ms, stages, moves, memory = st.integers(0, 4), [], [], []
    evicting = draw(st.permutations((True, False)))
    for d, evicts in enumerate(evicting):
        size = draw(st.integers(1, 3))
        stages.append(
            stage(d, (draw(ms), draw(ms), draw(st.integers(0, 2))), size, draw(st.sampled_from((0, 1, size))))
        )
        move = float(draw(st.integers(0, 3))), float(draw(st.integers(0, 3))), draw(st.integers(1, size))
        moves.append(dict(zip(EVICTION, move, strict=True)) if evicts else {})
        memory.append(size + draw(st.integers(0, size if evicts else 3)))
    problem = problem_of(stages, memory, 2, draw(st.sampled_from((0.0, 1.0, 3.0))))
    return problem.replace(
        devices=[each.model_copy(update={"peer": 1 - d}) for d, each in enumerate(problem.devices)],
        stages=[each.model_copy(update=move) for each, move in zip(problem.stages, moves, strict=True)],
    )


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """As `equal_and_tiny`; micro-batches may differ."""
    problem = draw(equal_and_tiny())
    return draw(differing(problem)) if draw(st.booleans()) else problem


@st.composite
def equal_and_tiny(draw: st.DrawFn) -> Problem:
    """A few ops on two devices, so that every schedule can be tried: one of them has a choice, or both share a link, or
    micro-batches take two routes."""
    ms, size = st.integers(0, 4), 2 * draw(st.integers(1, 2))
    choice = draw(st.sampled_from(("none", "whole", "parts", "again", "levels", "link", "routes")))
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    costs = st.tuples(ms, ms, ms)
    away = (draw(ms), draw(ms), draw(st.sampled_from((2, size))))
    memory = [size + draw(st.integers(0, size)), 2]
    if choice == "link":
        both = [stage(d, draw(costs), size, draw(st.integers(0, size)), away) for d in (0, 1)]
        return problem_of(both, [size, size], 2, 1.0, transfer_mode=duplex, devices=[{"link": "bus"}] * 2)
    if choice == "routes":
        both = [stage(d, draw(costs), 1, draw(st.integers(0, 1))) for d in (0, 1)]
        turned = draw(st.sampled_from(([0, 1], [1, 0])))
        return problem_of(both, [1, 2], 2, 1.0, routes=[[0, 1], [1, 0]], microbatch_routes=turned)
    again = (draw(ms), draw(st.integers(0, size))) if choice == "again" else None
    leaves = away if choice in ("whole", "parts") else None
    levels = [draw(levels_of(ms, size, 1)) for _ in range(2)] if choice == "levels" else []
    parts = 2 if choice == "parts" else 1
    short = stage(0, draw(costs), size, draw(st.integers(0, size)), leaves, again, parts, levels)
    plain = stage(1, draw(costs), 1)
    if draw(st.booleans()):
        return problem_of([plain | {"device": 0}, short | {"device": 1}], memory[::-1], 2, 1.0, transfer_mode=duplex)
    return problem_of([short, plain], memory, 2, 1.0, transfer_mode=duplex)


@st.composite
def partly_frozen(draw: st.DrawFn, most_devices: int = 2, most_microbatches: int = 3) -> Problem:
    """Very uneven stages, one or two a device in any order, some of which have ops that take no time or hold nothing,
    such as the backwards of frozen ones; all activations stay."""
    ms, size = st.sampled_from((0, 1, 2, 5, 13)), st.integers(0, 2)
    devices, m = draw(st.integers(1, most_devices)), draw(st.integers(1, most_microbatches))
    chunks = 2 if m == 1 else 1  # of more there are too many schedules to try
    order = [d for k in range(chunks) for d in (range(devices)[::-1] if k and draw(st.booleans()) else range(devices))]
    stages, need = [], [0] * devices
    for d in order:
        kind = draw(st.sampled_from(("frozen", "no weights", "trained", "trained")))
        forward, backward, weight, held, kept = draw(ms), draw(ms), draw(ms), draw(size), draw(size)
        if kind != "trained":
            weight, kept = 0, 0
        if kind == "frozen":
            backward, held = 0, 0
        stages.append(stage(d, (forward, backward, weight), held, kept))
        need[d] += max(held, kept)
    memory = [held + draw(st.integers(0, held + 1)) for held in need]
    return problem_of(stages, memory, m, draw(st.sampled_from((0.0, 1.0))))


@st.composite
def unequal_and_tiny(draw: st.DrawFn) -> Problem:
    """Two or three micro-batches that differ, in memory that is scarce for them, few enough for every schedule to be
    tried. Mostly each F, B and W takes time, as the MILP needs it."""
    problem = draw(equal_and_tiny())
    if problem.routes is None and not any(s.can_offload or s.can_recompute for s in problem.stages):
        problem = problem.replace(microbatches=draw(st.integers(2, 3)))
    problem = draw(differing(problem))
    costs = problem.costs
    needed = np.maximum(costs.activation, costs.saved_for_weight).max(axis=1)
    devices = []
    for d, device in enumerate(problem.devices):
        budget = int(needed[costs.device == d].max()) + draw(st.integers(0, 2))
        host = draw(st.sampled_from((None, None, 1, 2)))
        devices.append(device.model_copy(update={"activation_budget_bytes": budget, "host_memory_bytes": host}))
    if draw(st.integers(0, 3)):
        problem = lasting(problem)
    return problem.replace(devices=devices, fixed_order=draw(st.sampled_from((False, False, True))))


def lasting(problem: Problem) -> Problem:
    """The problem with 1 ms for each F, B and W that takes no time, as the MILP needs it."""
    fields = ("forward_ms", "backward_input_ms", "backward_weight_ms")
    stages = [
        each.model_copy(update={f: each_microbatch(lambda ms: ms or 1.0, getattr(each, f)) for f in fields})
        for each in problem.stages
    ]
    return problem.replace(stages=stages)
