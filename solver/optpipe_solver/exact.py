"""The times of a problem as exact fractions: the file's decimals, not their nearest floats."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import EachMs, each_microbatch

COMPUTE_MS = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")
TRANSFER_MS = ("offload_ms", "reload_ms")  # of all parts together
EVICTION_MS = ("evict_ms", "load_ms")


def exact(ms: float) -> Fraction:
    """The decimal that the number is written as."""
    return Fraction(repr(float(ms)))


def with_times(problem: Problem, change: Callable[[Fraction, bool], float]) -> Problem:
    """The problem with other times: `change` gets that of each op, of each part and of each message in ms, and whether
    it is one of compute."""

    def changed(ms: EachMs, parts: int = 1, computes: bool = False) -> EachMs:
        each: EachMs = each_microbatch(lambda ms: parts * change(exact(ms) / parts, computes), ms)
        return each

    def costs_changed(costs: Any, parts: int) -> dict[str, Any]:
        of_parts = dict.fromkeys(TRANSFER_MS, parts)
        names = (*COMPUTE_MS, *TRANSFER_MS, *EVICTION_MS)
        times = {name: ms for name in names if (ms := getattr(costs, name, None)) is not None}
        return {name: changed(ms, of_parts.get(name, 1), name in COMPUTE_MS) for name, ms in times.items()}

    stages = []
    for stage in problem.stages:
        levels = [level.model_copy(update=costs_changed(level, stage.offload_parts)) for level in stage.levels or ()]
        fields = {**costs_changed(stage, stage.offload_parts), "levels": tuple(levels) or None}
        stages.append(stage.model_copy(update=fields))
    messages = problem.messages and tuple(
        message.model_copy(update={"ms": changed(message.ms)}) for message in problem.messages
    )
    fields = {"stages": tuple(stages), "p2p_ms": changed(problem.p2p_ms), "messages": messages}
    return problem.model_copy(update=fields)


def common_step_ms(problem: Problem) -> Fraction:
    """The largest step of which every time of an op and of a message between devices is a multiple; 0 if nothing takes
    any time."""
    times = [exact(ms) for ms in np.unique(problem.costs.message_ms)]

    def read(ms: Fraction, _computes: bool) -> float:
        times.append(ms)
        return float(ms)

    with_times(problem.model_copy(update={"p2p_ms": 0.0, "messages": None}), read)
    denominator = lcm(*(ms.denominator for ms in times))
    return Fraction(gcd(*(int(ms * denominator) for ms in times)), denominator)


def serial_ms(problem: Problem) -> float:
    """The time of everything that could be done, one after the other: no schedule that starts all as early as can be is
    longer."""
    costs, levels = problem.costs, problem.costs.levels
    part_ms = costs.ms[[Kind.O, Kind.R]].sum(axis=0) + (levels.offload_ms + levels.reload_ms).sum(axis=0)
    compute_ms = costs.ms[[Kind.F, Kind.B, Kind.W, Kind.E, Kind.L]].sum(axis=0) + levels.recompute_ms.sum(axis=0)
    return float((compute_ms + part_ms * costs.parts[:, None] + costs.message_ms.sum(axis=0)).sum())
