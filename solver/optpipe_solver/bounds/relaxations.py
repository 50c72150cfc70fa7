"""Relaxations: for every schedule of a problem they have one that is no longer, so that their bounds are its bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from optpipe.model.figures import each_microbatch
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, RECOMPUTE, Level, StageCosts


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
        return costs.model_copy(
            update={
                "levels": None,
                "recompute_ms": each_microbatch(_least_number, *(x.recompute_ms for x in levels)),
                "checkpoint_bytes": each_microbatch(_least_number, *kept),
            }
        )

    return _with_costs(problem, changed)


def _with_costs(problem: Problem, changed: Callable[[Any], Any]) -> Problem:
    """The problem with other costs of stages and layers; the same object where none are others."""
    stages, layers = tuple(map(changed, problem.stages)), problem.layers and tuple(map(changed, problem.layers))
    if all(map(operator.is_, (*stages, *(layers or ())), (*problem.stages, *(problem.layers or ())))):
        return problem
    return problem.model_copy(update={"stages": stages, "layers": layers})


def _least_number(*numbers: float) -> float:
    return min(numbers)
