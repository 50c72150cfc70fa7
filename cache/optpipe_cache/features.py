"""The key of a problem: its figures as proportions on a logarithmic grid (OptPipe, section 4.2: "discretize ... into
proportional values").

Times are shares of a stage's work, the mean of F + B + W over all stages; sizes are shares of the largest activation; a
device's memory is the number of micro-batches whose activations fit into it. So the same model on a GPU twice as fast,
or measured again on a noisy day, has the same key or a neighbouring one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optpipe.model.arrays import Floats
from optpipe.model.costs import Costs
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

STEP = 0.01  # of the grid: differences of about one percent
SMALL = 0.1  # of a stage's work, or of an activation: smaller figures matter little, so their grid is coarser
MOST = 1e9  # cap of proportions: dividing by times near zero gives no useful number
REACH = 1.0  # two problems further apart than this are not similar; docs/cache.md has what it was set from
VERSION = 3  # of this key: other versions are never similar

Steps = NDArray[np.int16]
# How much more a difference counts than one of another feature; by default 1.
WEIGHT = {"microbatches": 0.1, "offload": 0.5, "reload": 0.5}  # one link has both, mostly equal


def structure(problem: Problem) -> str:
    """Hash what two problems must have in common before a program of one makes sense for the other.

    That is which ops there are, and on which devices they run. How many micro-batches there are may differ where all
    take the same route.
    """
    costs, routes = problem.costs, problem.all_routes
    moves = any(can.any() for can in (costs.can_offload, costs.can_evict, costs.can_update))
    content = {
        "version": VERSION,
        "devices": len(problem.devices),
        "placement": costs.device.tolist(),
        "routes": routes,
        "microbatch_routes": costs.route.tolist() if len(routes) > 1 else None,
        "transfer_mode": problem.transfer_mode if moves else None,
        "shared_links": problem.shared_links if moves else None,
        "offload_parts": costs.parts.tolist(),
        "can": [can.tolist() for can in (costs.can_offload, costs.can_recompute, costs.can_evict, costs.can_update)],
        "peer": costs.peer.tolist() if costs.can_evict.any() else None,
        "pairs": problem.overlap_factor is not None,
    }
    if _has_levels(costs):
        content["levels"] = costs.levels.count.tolist(), costs.levels.can_offload.tolist()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_levels(costs: Costs) -> bool:
    """Whether there is more to a level than its time and its checkpoint: others, or offloads."""
    return bool(costs.levels.count.max() > 1 or costs.levels.can_offload.any())


@dataclass(frozen=True, eq=False)
class Features:
    """The proportions of a problem, in steps of the grid."""

    steps: Steps  # all figures in a row
    sizes: dict[str, int]  # how many of them each feature has: one for each stage or device, or one

    @property
    def packed(self) -> bytes:
        return self.steps.astype("<i2").tobytes()

    @cached_property
    def _weights(self) -> Floats:
        return np.concatenate([np.full(n, STEP * WEIGHT.get(name, 1.0) / n) for name, n in self.sizes.items()])

    def distances(self, others: Steps) -> Floats:
        """The distance to each of the packed features in the rows of `others`."""
        far: Floats = np.abs(others.astype(np.int32) - self.steps) @ self._weights
        return far

    def terms(self, other: Features) -> dict[str, float]:
        """What each feature adds to the distance, the largest first; only those that differ."""
        *begins, _ = itertools.accumulate(self.sizes.values(), initial=0)
        sums = np.add.reduceat(np.abs(other.steps.astype(np.int32) - self.steps) * self._weights, begins)
        terms = [(name, float(value)) for name, value in zip(self.sizes, sums, strict=True) if value]
        return dict(sorted(terms, key=lambda term: -term[1]))


def features(problem: Problem) -> Features:
    """Return the problem's proportions."""
    figures = {name: np.atleast_1d(np.asarray(values, dtype=float)) for name, values in _proportions(problem)}
    steps = np.log1p(np.minimum(MOST, np.concatenate(list(figures.values()))) / SMALL) / STEP
    return Features(np.rint(steps).astype(np.int16), {name: len(values) for name, values in figures.items()})


def distance(a: Features, b: Features) -> float:
    """Return how different two problems of one structure are.

    The mean difference over stages or devices of each feature, summed over the features. For example, 0.1 are sizes or
    large times that differ by a tenth on every stage, or memory for a tenth fewer micro-batches on every device.
    """
    return float(a.distances(b.steps[None])[0])


def _proportions(problem: Problem) -> Iterator[tuple[str, Floats | float]]:
    costs, m = problem.costs, problem.microbatches
    work = float(costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=0).mean()) or 1.0
    largest = max(int(costs.activation.max()), int(costs.saved_for_weight.max())) or 1
    times = {
        "forward": Kind.F,
        "backward_input": Kind.B,
        "backward_weight": Kind.W,
        "offload": Kind.O,
        "reload": Kind.R,
        "recompute": Kind.C,
        "evict": Kind.E,
        "load": Kind.L,
        "gradient_out": Kind.G,
        "update": Kind.U,
        "parameters_in": Kind.P,
    }
    moved = (Kind.O, Kind.R)  # part by part
    spreads: list[tuple[str, Floats | float]] = []  # of micro-batches that differ
    levels = costs.levels
    again_ms = levels.recompute_ms[0] if len(levels.recompute_ms) else costs.ms[Kind.C]
    for name, kind in times.items():
        ms = again_ms if kind == Kind.C else costs.ms[kind] * (costs.parts[:, None] if kind in moved else 1)
        ms = ms / work
        yield name, ms.mean(axis=1)
        spreads.append((f"{name}_spread", ms.std(axis=1)))
    messages_ms = costs.message_ms[costs.message_ms > 0].tolist() or [0.0]
    yield "p2p", float(np.mean(messages_ms)) / work
    spreads.append(("p2p_spread", float(np.std(messages_ms)) / work))
    yield "overlap", float(np.mean(problem.least_factors))
    yield "microbatches", m
    devices = range(len(problem.devices))
    stages = [problem.stages_on(d) for d in devices]
    useful = min(m, 2 * len(problem.devices))  # by then no more memory helps
    fit = [_microbatches(costs.activation_budget[d], costs.activation[stages[d]].max(axis=1), useful) for d in devices]
    yield "memory", np.array(fit)
    hosted = [_microbatches(costs.host_memory[d], costs.offload[stages[d]].max(axis=1), m) for d in devices]
    yield "host_memory", np.array(hosted) / m
    checkpoint = levels.checkpoint[0] if len(levels.checkpoint) else np.zeros_like(costs.activation)
    sizes = {
        "activation": costs.activation,
        "saved_for_weight": costs.saved_for_weight,
        "offload": costs.offload,
        "checkpoint": checkpoint,
        "evict": costs.evict,
    }
    for name, each in sizes.items():
        nbytes = each / largest
        yield f"{name}_bytes", nbytes.mean(axis=1)
        spreads.append((f"{name}_bytes_spread", nbytes.std(axis=1)))
    yield from spreads
    if _has_levels(costs):
        for name in ("recompute_ms", "offload_ms", "reload_ms", "checkpoint", "offload"):
            unit = work if name.endswith("_ms") else largest
            yield f"{name}_levels", (getattr(levels, name) / unit).mean(axis=2).ravel()


def _microbatches(limit: int, per_stage: NDArray[np.int64], most: int) -> float:
    """How many micro-batches fit into `limit` bytes, at most `most`: more memory than that makes no difference."""
    one = int(per_stage.sum())
    return min(float(most), limit / one) if one else float(most)
