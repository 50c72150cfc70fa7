"""What to change where no schedule fits: the changes that the problem's own figures allow to compute, and that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE, Level, StageCosts, each_microbatch
from optpipe.process.protocol import Remedies, Remedy, Request
from optpipe.schedule import Schedule
from optpipe_solver import tuning
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit
from optpipe_solver.portfolio.partitions import partition_of_stages
from optpipe_solver.portfolio.placement_search import PlacementSearch
from optpipe_solver.portfolio.portfolio import Portfolio

SMALLER = (2, 4, 8)  # by so much micro-batches may be


class _Change(NamedTuple):
    """A change, and the problem that it leads to."""

    name: str
    problem: Problem
    has_times: bool = True  # whether figures say how long ops take then
    any_stages: bool = False


def offer_remedies(request: Request, emit: Emit, clock: Clock) -> None:
    """Emit the changes with which something fits, at first alone, then with the lengths of schedules as long as there
    is time."""
    changes = [each for each in _changes(request) if each.any_stages or not infeasibility(each.problem)]
    remedies = {each.name: Remedy(change=each.name) for each in changes if not each.any_stages}
    emit(_in_order(remedies))
    for change in changes:
        best: Schedule | None = None
        with suppress(OptPipeError):  # such as layers of other costs than the stages have
            best = _schedule(request, change, clock) if change.has_times and not clock.over else None
        if best:
            ms = length_ms(best, request.objective)
            remedies[change.name] = Remedy(change=change.name, method=best.method, value_ms=ms)
            emit(_in_order(remedies))


def _in_order(remedies: dict[str, Remedy]) -> Remedies:
    """The shortest first, those without a length last."""
    each = remedies.values()
    return Remedies(remedies=tuple(sorted(each, key=lambda x: NO_SCHEDULE_MS if x.value_ms is None else x.value_ms)))


def _schedule(request: Request, change: _Change, clock: Clock) -> Schedule | None:
    """The best schedule that a moment of search has."""
    asked = {
        "problem": change.problem,
        "method": "auto",
        "warm_start": None,
        "placements": "all" if change.any_stages else "keep",
        "time_limit_s": max(1e-3, clock.left_s if change.any_stages else min(tuning.REMEDY_S, clock.left_s)),
    }
    request = request.model_copy(update=asked)
    if not change.any_stages:
        portfolio = Portfolio(request, lambda _: None)
        for _ in portfolio.heuristics.run(share=1.0) if portfolio.begin() else ():
            pass
        return portfolio.incumbents.best
    search = PlacementSearch(request, lambda _: None)
    search.begin()
    for phase in islice(search.phases(), 2):
        phase.run(phase.share)
    best = min(search.contenders.all, key=lambda contender: contender.incumbents.best_ms)
    return best.incumbents.best


def _changes(request: Request) -> Iterator[_Change]:
    """Yield the changes that may help."""
    problem = request.problem
    for name in dict.fromkeys(level.name for layer in problem.layers or () for level in layer.all_levels):
        with suppress(InputError):
            yield _Change(f"recompute {name} in every backward, layer by layer", _recomputed(problem, name))
    if request.placements == "keep" and len(problem.devices) > 1 and len(problem.all_routes) == 1:
        yield _Change("all placements", problem, any_stages=True)
    if any(device.host_memory_bytes is not None for device in problem.devices):
        free = [device.model_copy(update={"host_memory_bytes": None}) for device in problem.devices]
        yield _Change("more host memory to offload to", problem.replace(devices=free))
    for n in SMALLER:
        smaller = problem.replace(stages=[_divided(stage, n) for stage in problem.stages], layers=None)
        if not infeasibility(smaller):
            name = f"micro-batches of 1/{n} the size, or {n} times the tensor parallelism"
            yield _Change(name, smaller, has_times=False)
            return


def _recomputed(problem: Problem, level: str) -> Problem:
    """The problem whose backwards compute each layer that has this level again, one after the other: of a layer its
    checkpoint stays, and each device keeps room for the largest whole one. Raises InputError if stages are not made of
    layers."""
    layers, room = [], 0
    for layer in problem.layers or ():
        chosen = next((each for each in layer.all_levels if each.name == level), None)
        if chosen:
            room = max(room, int(np.max(np.subtract(layer.activation_bytes, chosen.checkpoint_bytes))))
            fields = dict.fromkeys((*EVICTION, *OFFLOAD, *RECOMPUTE, "levels"))
            times = each_microbatch(lambda *ms: sum(ms), layer.backward_input_ms, chosen.recompute_ms)
            fields |= {"backward_input_ms": times, "activation_bytes": chosen.checkpoint_bytes, "offload_parts": 1}
            fields |= {name: getattr(chosen, name) for name in OFFLOAD}
            layer = layer.model_copy(update=fields)
        layers.append(layer)
    devices = [
        device.model_copy(update={"activation_budget_bytes": max(0, device.activation_budget_bytes - room)})
        for device in problem.devices
    ]
    placement = partition_of_stages(problem) or Placement.balanced(problem, 1)
    return placement.apply(problem.replace(layers=layers, devices=devices))


def _divided(costs: StageCosts, n: int) -> StageCosts:
    """The costs with 1/n of the activations, rounded up."""

    def sizes(record: StageCosts | Level) -> dict[str, Any]:
        names = (name for name in type(record).model_fields if name.endswith("_bytes"))
        values = {name: value for name in names if (value := getattr(record, name)) is not None}
        return {name: each_microbatch(lambda size: -(-size // n), value) for name, value in values.items()}

    levels = costs.levels and tuple(level.model_copy(update=sizes(level)) for level in costs.levels)
    return costs.model_copy(update={**sizes(costs), "levels": levels})
