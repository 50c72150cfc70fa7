"""What to change where no schedule fits: the changes that the problem's own figures allow to compute, and that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, EXCHANGE, OFFLOAD, RECOMPUTE, Level, StageCosts, each_microbatch
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
ALL = "placements = all"


def offer_remedies(request: Request, emit: Emit, clock: Clock) -> None:
    """Emit the changes with which something fits, at first alone, then with the lengths of schedules as long as there
    is time."""
    problem = request.problem
    changed = {name: each for name, each in _changes(problem) if not infeasibility(each)}
    remedies = {name: Remedy(change=name) for name in (*changed, *_smaller(problem))}
    if request.placements == "keep" and len(problem.devices) > 1 and len(problem.all_routes) == 1:
        changed[ALL] = problem  # it helps if there is a schedule
    emit(_in_order(remedies))
    for name, each in changed.items():
        best: Schedule | None = None
        with suppress(OptPipeError):  # such as layers of other costs than the stages have
            best = None if clock.over else _schedule(request.model_copy(update={"problem": each}), name == ALL, clock)
        if best:
            remedies[name] = Remedy(change=name, method=best.method, value_ms=length_ms(best, request.objective))
            emit(_in_order(remedies))


def _in_order(remedies: dict[str, Remedy]) -> Remedies:
    """The shortest first, those without a length last."""
    each = remedies.values()
    return Remedies(remedies=tuple(sorted(each, key=lambda x: NO_SCHEDULE_MS if x.value_ms is None else x.value_ms)))


def _schedule(request: Request, any_stages: bool, clock: Clock) -> Schedule | None:
    """The best schedule of published systems and of a moment of list scheduling."""
    seconds = clock.left_s if any_stages else min(tuning.REMEDY_S, clock.left_s)
    asked = {"method": "auto", "warm_start": None, "time_limit_s": max(1e-3, seconds)}
    request = request.model_copy(update=asked)
    if any_stages:
        search = PlacementSearch(request, lambda _: None)
        search.begin()
        for phase in islice(search.phases(), 2):
            phase.run(phase.share)
        return min(search.contenders.all, key=lambda contender: contender.incumbents.best_ms).incumbents.best
    portfolio = Portfolio(request, lambda _: None)
    for _ in portfolio.heuristics.run(share=1.0) if portfolio.begin() else ():
        pass
    return portfolio.incumbents.best


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the changes that may help, each with the problem that it leads to."""
    for name in dict.fromkeys(level.name for layer in problem.layers or () for level in layer.all_levels):
        with suppress(InputError):
            yield f"recompute {name} in every backward, layer by layer", _recomputed(problem, name)
    if any(device.host_memory_bytes is not None for device in problem.devices):
        free = [device.model_copy(update={"host_memory_bytes": None}) for device in problem.devices]
        yield "more host memory to offload to", problem.replace(devices=free)


def _smaller(problem: Problem) -> Iterator[str]:
    """Yield how much smaller micro-batches must be, for which the problem has no times. It does not say what tensor
    parallelism divides, weights among it."""
    for n in SMALLER:
        stages = [_divided(stage, n) for stage in problem.stages]
        if not infeasibility(problem.replace(stages=stages, layers=None)):
            yield f"micro-batches of 1/{n} the size (optpipe model --tp N says which tensor parallelism does as much)"
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
            fields = dict.fromkeys((*EVICTION, *OFFLOAD, *RECOMPUTE, *EXCHANGE, "levels"))
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


def _divided(record: StageCosts | Level, n: int) -> Any:
    """The record with 1/n of all bytes, rounded up."""
    sizes = ((name, size) for name, size in record if name.endswith("_bytes") and size is not None)
    fields: dict[str, Any] = {name: each_microbatch(lambda size: -(-size // n), size) for name, size in sizes}
    if isinstance(record, StageCosts) and record.levels:
        fields["levels"] = tuple(_divided(level, n) for level in record.levels)
    return record.model_copy(update=fields)
