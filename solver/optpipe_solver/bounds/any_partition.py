"""What holds for every partition of a problem's layers into looped or V-shaped chunks: a lower bound on the length, and
whether memory suffices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.model.records import MOST_MS, Stage, StageCosts, of_microbatch
from optpipe.text import distinct_sizes
from optpipe_solver.bounds.problem_facts import StageBytes, stage_bytes, without_evictions


def partition_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule of any partition of the layers falls below.

    The devices together have all the work to do. The one that is d-th in line starts no sooner than d layers and hops
    after the first, and after its last input gradient as much is still to come. All micro-batches pass each layer,
    after the layers before it. One micro-batch passes all layers and all devices there and back. What layers hold over
    time has to fit into all devices' memory (`_held`).
    """
    problem = without_evictions(problem)
    layers = problem.layers or ()
    hop = min(np.min(problem.p2p_ms), *(np.min(message.ms) for message in problem.messages or ()), MOST_MS)
    p = len({problem.stages[s].device for s in problem.all_routes[0]})
    if p > len(layers):
        return NO_SCHEDULE_MS  # there is no partition
    kinds = [(j, 1) for j in range(problem.microbatches)] if _differ(layers) else [(0, problem.microbatches)]
    times = [_layer_times(problem, j) for j, _ in kinds]
    counts = np.array([count for _, count in kinds])
    forward, backward, weight = (counts @ np.array(ms) for ms in zip(*times, strict=True))  # of all micro-batches
    whole = forward + backward + weight
    first, last, final = (np.min(ms, axis=0) for ms in zip(*times, strict=True))  # of any micro-batch at least
    hops = hop * np.arange(p)
    arrives = np.concatenate(([0.0], np.cumsum(first)))[:p] + hops
    leaves = np.concatenate(([0.0], np.cumsum(last)))[:p] + hops + final[0]
    once = max(each.forward.sum() + each.backward.sum() + each.weight[0] for each in times) + 2 * hops[-1]
    held = sum(count * _held(problem, layers, j, each) for (j, count), each in zip(kinds, times, strict=True))
    if objective == "span":
        return float(max(once, whole.max(), whole.sum() / p, held / p))
    inputs = (forward + backward).sum() + leaves.sum()
    on, back = (np.cumsum(ms) - ms for ms in (first, last))  # what is passed before a layer
    one_layer = on + np.maximum(whole, forward + backward + back + final[0])
    return float(max(once, one_layer.max(), (max(whole.sum(), inputs, held) + arrives.sum()) / p))


class _LayerTimes(NamedTuple):
    """(L,) the least times of a micro-batch in each layer, in ms; of a pair the share of each op."""

    forward: Floats
    backward: Floats
    weight: Floats


def _layer_times(problem: Problem, microbatch: int) -> _LayerTimes:
    layers, by_stages = problem.layers or (), isinstance(problem.overlap_factor, tuple)
    share = min(float(problem.pair_factors.min()), 0.5 if by_stages else 1.0)  # `pair_factors` of other stages: a half
    names = ("forward_ms", "backward_input_ms", "backward_weight_ms")
    times = ([of_microbatch(getattr(layer, name), microbatch) for layer in layers] for name in names)
    return _LayerTimes(*(share * np.array(each) for each in times))


def _held(problem: Problem, layers: Sequence[StageCosts], microbatch: int, ms: _LayerTimes) -> float:
    """The time that all devices together need for what one micro-batch's activations hold over time.

    An activation that can only stay is held from its stage's forward, which begins no later than the layer's own, to
    the stage's input gradient. One that can leave or be recomputed counts during its ops alone.
    """
    roomiest = max(1, *(problem.devices[stage.device].activation_budget_bytes for stage in problem.stages))
    trips = (ms.forward + ms.backward)[::-1].cumsum()[::-1]
    area = 0.0
    times = zip(*ms, trips, strict=True)
    for layer, held, (f_ms, b_ms, w_ms, trip_ms) in zip(layers, _layer_bytes(problem, microbatch), times, strict=True):
        area += held.forward * f_ms + held.backward * b_ms + held.weight * w_ms
        if not (layer.can_offload or layer.all_levels):
            area += held.stays * (trip_ms - f_ms - b_ms)
    return float(area / roomiest)


def _layer_bytes(problem: Problem, microbatch: int) -> list[StageBytes]:
    """Return what the activation of each layer holds, as if it were a stage of its own."""
    stages = tuple(Stage(device=0, **layer.model_dump(exclude_none=True)) for layer in problem.layers or ())
    each = {"stages": stages, "layers": None, "routes": None, "microbatch_routes": None}
    return stage_bytes(problem.model_copy(update=each), microbatch)


def _differ(layers: Sequence[StageCosts]) -> bool:
    """Whether layers have a figure for each micro-batch."""
    return any(True for layer in layers for _ in layer.lists())


def no_partition_fits(problem: Problem) -> str | None:
    """Say why memory admits no schedule of any partition of the layers; None if that cannot be shown at once."""
    problem = without_evictions(problem)
    devices = {stage.device for stage in problem.stages}
    memory = [problem.devices[d].activation_budget_bytes for d in devices]
    layers = problem.layers or ()
    if len(devices) > len(layers):
        return f"{len(layers)} layers cannot make a stage for each of {len(devices)} devices"
    for j in range(problem.microbatches if _differ(layers) else 1):
        held = _layer_bytes(problem, j)
        largest = max(range(len(layers)), key=lambda k: held[k].peak)
        if held[largest].peak > max(memory):
            needed, most = distinct_sizes(held[largest].peak, max(memory))
            return f"layers[{largest}] needs {needed} and no device has more than {most}"
        stays = sum(each.least() for each in held)
        if stays > sum(memory):
            which = f"micro-batch {j}" if _differ(layers) else "one micro-batch"
            needed, whole = distinct_sizes(stays, sum(memory))
            return f"{which} leaves at least {needed} on the devices, and all of them together have {whole}"
    return None
