"""`Placement`: how the model is cut into stages, and which device runs each of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from optpipe.errors import InputError
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.model.records import (
    COMPUTE_MS,
    EVICTION,
    EXCHANGE,
    RECOMPUTE,
    UPDATE,
    Document,
    EachBytes,
    EachMs,
    Index,
    Items,
    StageCosts,
    each_microbatch,
)

Shape = Literal["looped", "v", "bidirectional"]
WAYS: dict[Shape, int] = {"looped": 1, "v": 1, "bidirectional": 2}  # the number of routes over the devices
SHAPES: tuple[Shape, ...] = ("looped", "v")  # of one route
NAMES: dict[Shape, str] = {"looped": "looped", "v": "V-shaped", "bidirectional": "bidirectional"}
MOST_CHUNKS = 64  # per device
MOST_TOLD = 8  # stages whose layers are told one by one
# Of the shorter of compute and all-to-all of a pair what does not hide: DeepSeek's published profile has 128.5 ms for
# 124.3 and 114.5 ms. ± 0.001 by its digits; one profile, of H800 in 8 bits, says nothing of other kernels.
EXPOSED = 0.0367
ROUNDING = 1e-9  # relative: sums of the same times in another order may differ by so much
Count = Annotated[int, Field(strict=True, ge=0)]


class Placement(Document):
    """Every device of a pipeline runs `chunks` stages; stages are numbered along the model.

    - Looped: every chunk passes the devices in the order of the given stages (interleaved 1F1B, Narayanan et al. 2021).
    - V-shaped: every other chunk passes them backwards, so that the last device of one chunk is the first of the next
      (V-schedules, Qi et al. 2024).
    - Bidirectional (DualPipe): one chunk a device each way. The p stages on devices d_0 to d_(p-1) become 2p on two
      routes: stage p + k has the costs of stage k and is on device d_(p-1-k). Micro-batches alternate between the
      routes. Every device holds the parameters of two stages, so `activation_budget_bytes` must allow for that.

    If the problem has `layers`, `layers` here says how many of them each stage gets, in order; of a bidirectional
    pipeline, the stages of one route.

    `devices` is the order in which a chunk passes them, if another than that of the given stages (`folded` has one). A
    stage takes budget and peer along, as GPUs are taken to be alike; links, nodes, host memory and messages stay.
    """

    WHAT = "placement"

    chunks: Annotated[int, Field(strict=True, ge=1, le=MOST_CHUNKS)]
    shape: Shape = "looped"
    layers: Annotated[Items[Count], Field(min_length=1, max_length=4096)] | None = None
    devices: Annotated[Items[Index], Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shape == "bidirectional" and self.chunks > 1:
            raise ValueError(
                f"chunks = {self.chunks}: a bidirectional placement has chunks = 1, one stage a device each way"
            )
        return self

    @classmethod
    def balanced(cls, problem: Problem, chunks: int, shape: Shape = "looped") -> Self:
        """The placement of as many stages a device (bidirectional: a device and way), as even as the layers allow.

        Raises InputError if there is no such placement, or there are too few layers.
        """
        placement = cls.from_dict({"chunks": chunks, "shape": shape})
        if problem.layers is None:
            return placement
        memory = [problem.devices[d].activation_budget_bytes for d in placement.order(problem)]
        least = np.reshape(memory, (WAYS[shape], -1)).min(axis=0).tolist()  # of the devices that run the same stage
        if len(least) > len(problem.layers):
            raise InputError(f"chunks = {chunks}: {len(least)} stages cannot be made of {len(problem.layers)} layers")
        return placement.model_copy(update={"layers": even_cuts(problem.layers, least)})

    def __str__(self) -> str:
        """Text such as `2 chunks a device, V-shaped, layers 3 4 4 5`."""
        shape = f", {NAMES[self.shape]}" if self.chunks > 1 or WAYS[self.shape] > 1 else ""
        layers = f", layers {counts_text(self.layers)}" if self.layers else ""
        devices = f", on devices {' '.join(map(str, self.devices))} in this order" if self.devices else ""
        return f"{self.chunks} chunk{'s' * (self.chunks > 1)} a device{shape}{layers}{devices}"

    def order(self, problem: Problem) -> list[int]:
        """The device of each new stage. The problem's own stages give the order of the devices."""
        return self.along(problem.stages[s].device for s in _only_route(problem))

    def along(self, devices: Iterable[int]) -> list[int]:
        """The device of each new stage, given the device of each of the problem's own stages, in order."""
        row = list(dict.fromkeys(devices))
        back = row if self.shape == "looped" else row[::-1]
        return [d for c in range(self.chunks * WAYS[self.shape]) for d in (back if c % 2 else row)]

    def apply(self, problem: Problem) -> Problem:
        """The problem with these stages instead of its own; the problem itself if they are the same.

        Raises InputError if the problem has several routes, or if `layers` does not fit its layers.
        """
        if self.devices is not None:
            problem = on_devices(problem, self.devices)
        route, order, ways = _only_route(problem), self.order(problem), WAYS[self.shape]
        row = order[: len(order) // ways]
        if problem.layers is None:
            if self.layers is not None:
                raise InputError("placement.layers: the problem has none")
            of = [problem.stages[s] for s in route]
            if problem.stack and self.chunks > 1:  # not all of the first stage stays first: where gradients are unknown
                sizes = of[0].activation_bytes, of[0].saved_for_weight_bytes  # they count as much as the activation
                held = each_microbatch(lambda size, saved: saved if saved > size else 2 * size, *sizes)
                of[0] = of[0].model_copy(update={"saved_for_weight_bytes": held})
            costs = [together([stage for stage in of if stage.device == d], self.chunks) for d in row]
        else:
            cuts = (0, *accumulate(self._layers_of(problem, len(row))))
            costs = [together(problem.layers[a:b]) for a, b in pairwise(cuts)]
        stages = []
        for d, cost in zip(order, costs * ways, strict=True):
            lost = EVICTION if problem.devices[d].peer is None else ()  # without a peer it cannot evict
            stages.append({"device": d, **{name: value for name, value in cost.items() if name not in lost}})
        routes: dict[str, Any] = {"routes": None, "microbatch_routes": None}
        if ways > 1:
            numbers = np.arange(len(order)).reshape(ways, -1).tolist()
            routes = {"routes": numbers, "microbatch_routes": [j % ways for j in range(problem.microbatches)]}
        one_factor = not isinstance(problem.overlap_factor, tuple)
        placed = problem.replace(stages=stages, **routes, **({} if one_factor else {"overlap_factor": 1.0}))
        if (placed.stages, placed.all_routes) == (problem.stages, problem.all_routes):
            return problem
        return placed if one_factor else placed.replace(overlap_factor=pair_factors(placed.stages))

    def _layers_of(self, problem: Problem, stages: int) -> tuple[int, ...]:
        there = len(problem.layers or ())
        if self.layers is None:
            raise InputError(
                f"placement.layers is missing: the problem has {there} layers, each of {stages} stages takes some"
            )
        if len(self.layers) != stages:
            raise InputError(
                f"placement.layers has {len(self.layers)} entries: {self.chunks} chunks a device make {stages} stages"
            )
        if sum(self.layers) != there:
            raise InputError(f"placement.layers add up to {sum(self.layers)}: the problem has {there} layers")
        return self.layers


def on_devices(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem with its stages on these devices in this order. Raises InputError if they are on others, or there are
    several routes."""
    before = devices_in_order(problem)
    if sorted(order) != sorted(before):
        raise InputError(f"placement.devices = {list(order)}: the stages are on devices {sorted(before)}")
    to: dict[int | None, int] = dict(zip(before, order, strict=True))
    devices = list(problem.devices)
    for d, new in zip(before, order, strict=True):
        moved = problem.devices[d]
        update = {"activation_budget_bytes": moved.activation_budget_bytes, "peer": to.get(moved.peer, moved.peer)}
        devices[new] = problem.devices[new].model_copy(update=update)
    stages = [stage.model_copy(update={"device": to[stage.device]}) for stage in problem.stages]
    return problem.replace(devices=devices, stages=stages)


def devices_in_order(problem: Problem) -> list[int]:
    """The devices in the order in which stages pass them. Raises InputError if the problem has several routes."""
    return list(dict.fromkeys(problem.stages[s].device for s in _only_route(problem)))


def folded(nodes: Sequence[str | int]) -> list[int]:
    """The order of devices, given the node of each, in which the first and the last stages share nodes, such as 0 to 3
    and 12 to 15 of 16 (PipeOffload, Wan et al. 2025, appendix C, "Enhanced Node Assignment"), and pairs of BPipe. What
    falls evenly along a pipeline then has equal sums in nodes of an even number of devices."""
    last, order = len(nodes) - 1, [0] * len(nodes)
    from_both_ends = iter(sorted(range(len(nodes)), key=lambda place: min(place, last - place)))
    for node in dict.fromkeys(nodes):
        devices = [d for d, other in enumerate(nodes) if other == node]
        for place, d in zip(sorted(islice(from_both_ends, len(devices))), devices, strict=True):
            order[place] = d
    return order


def pair_factors(stages: Sequence[StageCosts]) -> tuple[tuple[float, ...], ...]:
    """(S, S) `overlap_factor` of stages by their all-to-all, of which one op hides what the other one computes.

    A pair of F and BW lasts as long as the compute of both or the all-to-all of both, whichever is longer, and
    `EXPOSED` of the shorter; no shorter than F and than B, which are chains. Raises InputError if a stage has no
    `forward_exchange`.
    """
    if missing := [s for s, stage in enumerate(stages) if stage.forward_exchange is None and np.any(stage.forward_ms)]:
        raise InputError(
            f"overlap_factor: its lists are for the stages given; others need one number for all pairs, or stages and "
            f"layers with forward_exchange and backward_exchange (stages[{missing[0]}] has none)"
        )
    f, b, w = (np.array([np.mean(getattr(stage, field)) for stage in stages]) for field in COMPUTE_MS)
    sent_f, sent_b = (np.array([getattr(stage, field) or 0.0 for stage in stages]) for field in EXCHANGE)
    whole, sent = np.add.outer(f, b + w), np.add.outer(sent_f * f, sent_b * b)
    longer = np.maximum(sent, whole - sent)
    lasts = np.maximum.reduce([longer + EXPOSED * (whole - longer), *np.broadcast_arrays(f[:, None], b)])
    factors = np.divide(lasts, whole, out=np.ones_like(whole), where=whole > 0).round(6)
    return tuple(map(tuple, factors.tolist()))


def rechunk(problem: Problem, chunks: int, shape: Shape = "looped") -> Problem:
    """The problem with `chunks` stages per device, as even as the layers allow.

    Raises InputError if the problem has several routes or too few layers.
    """
    return Placement.balanced(problem, chunks, shape).apply(problem)


def together(costs: Sequence[StageCosts], shares: int = 1) -> dict[str, Any]:
    """Joins stages or layers, cuts the result into `shares` equal pieces, and gives the fields of one piece.

    Bytes are rounded up, so that the pieces together hold no less than `costs`. Activations of `costs` that can be
    offloaded, evicted or recomputed still can be; the others stay on the device. The piece is offloaded in as many
    parts as all of `costs` allow. A checkpoint is the input of a piece, so a piece of a single stage has that stage's
    whole checkpoint.
    """

    def ms(field: str, of: Sequence[Any]) -> EachMs:
        joined: EachMs = each_microbatch(lambda *values: sum(values) / shares, *(getattr(c, field) for c in of))
        return joined

    def size(values: Sequence[EachBytes]) -> EachBytes:
        joined: EachBytes = each_microbatch(lambda *values: -(-sum(values) // shares), *values)
        return joined

    def whole(away: Sequence[EachBytes]) -> EachBytes:
        """The activation of a piece, so that it keeps no less than `costs` keep while the bytes in `away` are away."""
        staying = size([*(c.activation_bytes for c in costs), *(each_microbatch(operator.neg, x) for x in away)])
        kept: EachBytes = each_microbatch(operator.add, size(away), staying)
        return kept

    leaving = [c for c in costs if c.can_offload]
    evicting = [c for c in costs if c.can_evict]
    offload, evict = [c.offload_bytes or 0 for c in leaving], [c.evict_bytes or 0 for c in evicting]
    activation = each_microbatch(max, whole(offload), whole(evict))
    fields: dict[str, Any] = {
        **{field: ms(field, costs) for field in COMPUTE_MS},
        "activation_bytes": activation,
        "saved_for_weight_bytes": size([c.saved_for_weight_bytes for c in costs]),
    }
    if leaving:
        fields |= {name: ms(name, leaving) for name in ("offload_ms", "reload_ms")}
        fields |= {"offload_bytes": size(offload)}
    if parts := [c.offload_parts for c in costs if c.can_offload or c.can_offload_checkpoints]:
        fields |= {"offload_parts": min(parts)}
    fields |= _levels_together(costs, activation, ms, size)
    if evicting:
        fields |= {name: ms(name, evicting) for name in ("evict_ms", "load_ms")}
        fields |= {"evict_bytes": size(evict)}
    if costs and all(c.forward_exchange is not None for c in costs):
        for name, of in zip(EXCHANGE, COMPUTE_MS, strict=False):
            there, times = [getattr(c, name) for c in costs], [float(np.mean(getattr(c, of))) for c in costs]
            mean = float(np.average(there, weights=times)) if sum(times) else 0.0
            fields[name] = float(np.clip(mean, min(there), max(there)))  # of equal ones the same
    if updating := [c for c in costs if c.can_update]:
        fields |= {name: ms(name, updating) for name in UPDATE}
    return fields


def _levels_together(
    costs: Sequence[StageCosts],
    activation: EachBytes,
    ms: Callable[[str, Sequence[Any]], EachMs],
    size: Callable[[Sequence[EachBytes]], EachBytes],
) -> dict[str, Any]:
    """The fields of a piece's levels, one for each name; what has no level of that name stays. `ms` and `size` are
    those of `together`. The smallest checkpoint of a stage is its input, which none of its pieces goes below."""
    levels: list[dict[str, Any]] = []
    for name in dict.fromkeys(level.name for c in costs for level in c.all_levels):
        by_name = [next((level for level in c.all_levels if level.name == name), None) for c in costs]
        again = [level for level in by_name if level]
        leaving = [level for level in again if level.can_offload]
        able = [c for c, level in zip(costs, by_name, strict=True) if level]
        inputs = [each_microbatch(lambda *x: min(x), *(x.checkpoint_bytes for x in c.all_levels)) for c in able]
        stays = [x.checkpoint_bytes if x else c.activation_bytes for c, x in zip(costs, by_name, strict=True)]
        kept = each_microbatch(min, activation, each_microbatch(lambda *x: max(x), size(stays), *inputs))
        levels.append({"name": name, "recompute_ms": ms("recompute_ms", again), "checkpoint_bytes": kept})
        if leaving:
            levels[-1] |= {field: ms(field, leaving) for field in ("offload_ms", "reload_ms")}
            levels[-1] |= {"offload_bytes": each_microbatch(min, kept, size([x.offload_bytes or 0 for x in leaving]))}
    if any(c.levels is not None for c in costs):
        return {"levels": levels}
    return {field: levels[0][field] for field in RECOMPUTE} if levels else {}


def counts_text(counts: Sequence[int]) -> str:
    """How many layers each stage has: `3 4 4 5`, `2 each`, or, of many stages, `1, 62×2, 1`."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    if len(runs) == 1 and len(counts) > 1:
        return f"{counts[0]} each"
    if len(counts) <= MOST_TOLD or 2 * len(runs) > len(counts):
        return " ".join(map(str, counts))
    return ", ".join(f"{times}×{count}" if times > 1 else str(count) for count, times in runs)


def even_cuts(layers: Sequence[StageCosts], memory: Sequence[int]) -> tuple[int, ...]:
    """How many layers each of `len(memory)` stages gets so that the longest stage is as short as possible.

    By the dynamic program of the survey of pipeline parallelism. Among the best cuts it takes the most even one, by the
    sum of squares: next to a heavy layer, which no cut can split, the other stages stay even. If possible, no
    activation of one stage alone exceeds its device's memory. A layer takes the time of its F, B and W; where
    micro-batches differ, the sum of these times over all of them, and the largest activation.
    """
    sizes = {}  # (work, bytes) of each kind of layer: a model has few
    for c in {id(c): c for c in layers}.values():
        times = (getattr(c, field) for field in COMPUTE_MS)
        sizes[id(c)] = np.sum(each_microbatch(lambda *ms: sum(ms), *times)), np.max(c.activation_bytes)
    work, held = np.array([sizes[id(c)] for c in layers], dtype=float).T
    upto, holds = (np.concatenate(([0.0], np.cumsum(x))) for x in (work, held))
    lasts = upto - upto[:, None]  # [i, j]: a stage of layers i to j - 1
    lasts[np.tril_indices(len(upto))] = np.inf  # no stage without a layer
    penalty = 1.0 + upto[-1]  # longer than any stage
    tables = {size: np.where(holds - holds[:, None] <= size, lasts, lasts + penalty) for size in set(memory)}
    heaviest, _ = _best_cuts([tables[size] for size in memory], np.maximum)
    even = {size: np.where(table <= heaviest * (1 + ROUNDING), table**2, np.inf) for size, table in tables.items()}
    return _best_cuts([even[size] for size in memory], np.add)[1]


def _best_cuts(tables: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The best way from 0 to the end, with one step in each table: entry [i, j], then [j, k] of the next.

    Returns the least value, which `join` makes of the entries, and the length j - i of each step.
    """
    value = np.full(len(tables[0]), np.inf)
    value[0] = 0.0
    cuts = []
    for table in tables:
        options = join(value[:, None], table)
        cuts.append(options.argmin(axis=0))
        value = options.min(axis=0)
    at, counts = len(value) - 1, []
    for cut in reversed(cuts):
        counts.append(at - int(cut[at]))
        at = int(cut[at])
    return float(value[-1]), tuple(reversed(counts))


def _only_route(problem: Problem) -> tuple[int, ...]:
    if len(problem.all_routes) > 1:
        raise InputError(f"routes: there are {len(problem.all_routes)}, a placement is for one route only")
    return problem.all_routes[0]
