"""What bounds read of a problem: relaxations, the least times on the paths of micro-batches, and what an activation
holds on its device from step to step.

For every schedule of a problem a relaxation has one that is no longer, so that its bounds are those of the problem.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.model.arrays import Flags, Floats
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, RECOMPUTE, Level, StageCosts, each_microbatch

F, B, W, BW, C = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C
Pass = tuple[int, int]  # the first micro-batch of a class of equal ones, and a stage


def without_evictions(problem: Problem) -> Problem:
    """The problem in which nothing is evicted.

    Instead, an activation leaves as much for nothing and is back at once, like a recompute that takes no time.
    """

    def changed(costs: StageCosts) -> StageCosts:
        if not costs.can_evict:
            return costs
        kept = each_microbatch(operator.sub, costs.activation_bytes, costs.evict_bytes)
        evicted = Level(name="evicted", recompute_ms=0.0, checkpoint_bytes=kept)
        gone = dict.fromkeys((*RECOMPUTE, *EVICTION))
        return costs.model_copy(update={**gone, "levels": (*costs.all_levels, evicted)})

    return _with_costs(problem, changed)


def one_level(problem: Problem) -> Problem:
    """The problem in which each stage has one level of recomputation.

    The level takes no longer than any of the stage's levels, and keeps no more than any keeps when what can leave of
    its checkpoint has left, which here it does for nothing.
    """

    def changed(costs: StageCosts) -> StageCosts:
        levels = costs.all_levels
        if len(levels) < 2 and not any(level.can_offload for level in levels):
            return costs
        kept = (each_microbatch(operator.sub, x.checkpoint_bytes, x.offload_bytes or 0) for x in levels)
        least_ms = each_microbatch(_least_number, *(x.recompute_ms for x in levels))
        least_bytes = each_microbatch(_least_number, *kept)
        return costs.model_copy(update={"levels": None, "recompute_ms": least_ms, "checkpoint_bytes": least_bytes})

    return _with_costs(problem, changed)


def _with_costs(problem: Problem, changed: Callable[[Any], Any]) -> Problem:
    """The problem with other costs of stages and layers; the same object where none are others."""
    stages, layers = tuple(map(changed, problem.stages)), problem.layers and tuple(map(changed, problem.layers))
    if all(map(operator.is_, (*stages, *(layers or ())), (*problem.stages, *(problem.layers or ())))):
        return problem
    return problem.model_copy(update={"stages": stages, "layers": layers})


def _least_number(*numbers: float) -> float:
    return min(numbers)


class Paths(NamedTuple):
    """The least times in ms on the paths of micro-batches; by the first micro-batch of each class of equal ones, or by
    `Pass`."""

    passing: dict[int, int]  # how many micro-batches each class has
    ms: dict[int, Floats]  # `shortest_times` of each class
    passes: list[list[Pass]]  # of each device
    used: Flags  # (D,) devices that some micro-batch passes
    arrives: Floats  # (D,) until a forward reaches each device
    leaves: Floats  # (D,) from its last input gradient to the end
    returns: Floats  # (D,) from its last input gradient to the end of that micro-batch's first stage
    reaches: dict[Pass, float]  # until a forward reaches the stage
    round_trip: dict[Pass, float]  # from a forward's start to its input gradient's end
    after: dict[Pass, float]  # from an input gradient's end to the end of all
    back: dict[Pass, float]  # from an input gradient's end to the end of the first stage
    one_entry: bool  # whether all routes begin on one device


def shortest_times(problem: Problem, microbatch: int) -> Floats:
    """Return (len(Kind), S) the least time of a micro-batch's ops: of a pair its share, where W may be a part of a
    paired BW. A pair takes f·(F + B) ≥ f₁·F + f₂·B, where f₁ is the least factor with this F, f₂ with this B."""
    ms = problem.costs.ms[..., microbatch].copy()
    forwards, backwards = problem.least_factors
    ms[F] *= forwards
    ms[[B, W]] *= backwards
    return ms


def shortest_paths(problem: Problem) -> Paths:
    """Return the least times on the paths through all stages and back."""
    costs, device, examples = problem.costs, problem.costs.device, problem.costs.representatives.tolist()
    reaches, round_trip, after, home = (dict[Pass, float]() for _ in range(4))
    passes: list[list[Pass]] = [[] for _ in problem.devices]
    times = {j: shortest_times(problem, j) for j in examples}
    for j in examples:
        route, ms = problem.route(j), times[j]
        there_ms, back_ms = (costs.message_ms[way, :, j].tolist() for way in (FORWARDS, GRADIENTS))
        on = list(accumulate((ms[F, a] + there_ms[b] for a, b in pairwise(route)), initial=0.0))
        back = list(accumulate((ms[B, a] + back_ms[a] for a in route[:-1]), initial=0.0))
        last = ms[F, route[-1]] + ms[B, route[-1]]
        rest = 0.0  # after the input gradient of a stage: its weight gradient, or the path back
        for k, s in enumerate(route):
            rest = max(ms[W, s], rest + (back[k] - back[k - 1] if k else 0.0))
            reaches[j, s], after[j, s], home[j, s] = on[k], rest, back[k] + ms[W, route[0]]
            round_trip[j, s] = on[-1] - on[k] + last + back[-1] - back[k]
            passes[device[s]].append((j, s))
    arrives, leaves, returns = (
        np.array([min((ms[at] for at in each), default=inf) for each in passes]) for ms in (reaches, after, home)
    )
    passing = dict(zip(examples, np.bincount(costs.class_of).tolist(), strict=True))
    one_entry = len({int(device[problem.route(j)[0]]) for j in examples}) == 1
    used = np.isfinite(arrives)
    return Paths(passing, times, passes, used, arrives, leaves, returns, reaches, round_trip, after, home, one_entry)


class LevelBytes(NamedTuple):
    """The bytes of an activation that is recomputed by one level."""

    checkpoint: int  # between F and C
    recompute: int  # while C runs
    peak: int  # the most from F to the end of the backward
    parts: list[int]  # of each part of the checkpoint that can leave


class StageBytes(NamedTuple):
    """The bytes that an activation holds, by the memory rule of `optpipe.evaluate.effects`.

    Where there is a choice, B and W or BW, it is the least of both: whatever is chosen, a step holds no less.
    """

    forward: int  # while F runs
    stays: int  # between F and the backward, if nothing leaves
    backward: int  # while B runs, or BW
    waiting: int  # between B and W
    weight: int  # while W runs, or BW
    waiting_peak: int  # the most from the end of B to that of W
    peak: int  # the most from F to the end of the backward
    most: int  # the most at once, whatever is chosen
    parts: list[int]  # of each part that can leave, if it is not recomputed; none if nothing can
    levels: list[LevelBytes]

    def counted(self) -> set[int]:
        """What it may hold while an op of it runs, and between F and the backward with the largest parts away."""
        ways = ((self.stays, self.parts), *((level.checkpoint, level.parts) for level in self.levels))
        left = {stays - gone for stays, parts in ways for gone in accumulate(sorted(parts, reverse=True), initial=0)}
        return left | {self.forward, self.backward, self.weight, *(level.recompute for level in self.levels)}

    def least(self) -> int:
        """Between F and the backward, at least: what can leave has left, or is to be recomputed."""
        return min([self.stays - sum(self.parts), *(level.checkpoint - sum(level.parts) for level in self.levels)])


def stage_bytes(problem: Problem, microbatch: int) -> list[StageBytes]:
    """Return (S,) the bytes of a micro-batch's activation of each stage."""
    effects = Effects(problem)
    takes, frees = (amounts[..., microbatch].tolist() for amounts in (effects.takes, effects.frees))
    again = [[table[..., microbatch].tolist() for table in tables] for tables in effects.by_level]
    by_stage = []
    for s, stage in enumerate(problem.stages):
        forward, stays = takes[F][s], takes[F][s] - frees[F][s]
        fused, split = stays + takes[BW][s], stays + takes[B][s]
        waiting = split - frees[B][s]
        waiting_peak = waiting + takes[W][s]
        peak = max(forward, min(fused, split))
        levels = []
        for level, (of, (again_takes, again_frees)) in enumerate(zip(stage.all_levels, again, strict=False)):
            checkpoint = again_takes[F][s] - again_frees[F][s]
            recompute = checkpoint + again_takes[C][s]
            sizes = effects.parts_by_level[level][s, microbatch, : stage.offload_parts].tolist()
            levels.append(LevelBytes(checkpoint, recompute, max(peak, recompute), sizes if of.can_offload else []))
        most = max(peak, *(level.peak for level in levels), fused, split, waiting_peak)
        backwards = min(split, fused), waiting, min(waiting_peak, fused), waiting_peak
        sizes = effects.parts[s, microbatch, : stage.offload_parts].tolist()
        parts = sizes if stage.can_offload else []
        by_stage.append(StageBytes(forward, stays, *backwards, peak, most, parts, levels))
    return by_stage
