"""Which layers make a stage: the partition that the given stages are, better and better ones, and what holds for all of
them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, permutations

import numpy as np

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats
from optpipe.model.placement import Placement, Shape
from optpipe.model.problem import Problem
from optpipe.model.records import StageCosts
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.floor import infeasibility, without_evictions
from optpipe_solver.heuristics import STREAMS, value

POLICIES = 6  # of AdaOffload that judge a partition
GRAIN = 40  # steps from none to all of a weight
ROUNDING = 0.01  # of a sum: stages and their layers may be measured on their own
MOST_MOVES = 240  # from one partition; of more a sample is tried

SHAPES: tuple[Shape, ...] = ("looped", "v")


def given(problem: Problem) -> Placement | None:
    """The placement that the problem's own stages are, if they are whole layers in equally many chunks a device."""
    stages = [problem.stages[s] for s in problem.all_routes[0]]
    devices = [stage.device for stage in stages]
    chunks = len(stages) // len(set(devices))
    shape = next(
        (shape for shape in SHAPES if chunks <= 64 and Placement(chunks=chunks, shape=shape).order(problem) == devices),
        None,
    )
    layers, ends = problem.layers or (), [0]
    reached = [np.zeros(4), *accumulate(_figures(layer) for layer in layers)]
    for total in accumulate(_figures(stage) for stage in stages):
        end = next((k for k in range(ends[-1] + 1, len(reached)) if np.allclose(reached[k], total, rtol=1e-6)), None)
        if end is None:
            return None
        ends.append(end)
    if shape is None or ends[-1] != len(layers):
        return None
    return Placement(chunks=chunks, shape=shape, layers=tuple(np.diff(ends).tolist()))


def mismatch(problem: Problem) -> str | None:
    """Where the layers are not what the given stages are made of: stages cut from them would be those of another
    model."""
    names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "activation_bytes", "saved_for_weight_bytes")
    for name in names:
        layers, stages = (
            sum(getattr(costs, name) for costs in these) for these in (problem.layers or (), problem.stages)
        )
        rounded = len(problem.stages) if name.endswith("_bytes") else 0
        if abs(layers - stages) > ROUNDING * max(layers, stages) + rounded:
            sums = f"{layers:.6g}, those of the stages to {stages:.6g}"
            return f"layers: their {name} add up to {sums}; the stages given must be made of these layers"
    return None


def _figures(costs: StageCosts) -> Floats:
    return np.array(
        [costs.forward_ms, costs.backward_input_ms, costs.backward_weight_ms, costs.activation_bytes], dtype=float
    )


@dataclass
class Climb:
    """From one partition to a better neighbour, as long as there is one: a layer less for one stage, one more for
    another, those between shifted. A partition is as good as the best simulated schedule of a few policies of
    AdaOffload, which knows the memory."""

    problem: Problem
    objective: Objective
    placement: Placement
    seed: int = 0
    length_ms: float = float("inf")

    def __post_init__(self) -> None:
        self.looks = self._looks()

    def _looks(self) -> Iterator[int]:
        """Yields after each look at a partition how many compute ops were handled for it."""
        yield self._look(self.placement)
        while True:
            before = self.length_ms
            for _, moved in sorted(self._neighbours(), key=lambda pair: pair[0]):
                yield self._look(moved)
                if self.length_ms < before:
                    break
            else:
                return

    def _neighbours(self) -> Iterator[tuple[float, Placement]]:
        """Those that could be shorter, with what no schedule of theirs is shorter than."""
        counts = self.placement.layers or ()
        pairs = list(permutations(range(len(counts)), 2))
        if len(pairs) > MOST_MOVES:
            pairs = random.Random(self.seed).sample(pairs, MOST_MOVES)
        for less, more in pairs:
            if counts[less] > 1:
                moved = list(counts)
                moved[less] -= 1
                moved[more] += 1
                placement = self.placement.model_copy(update={"layers": tuple(moved)})
                bound = trivial_bound(placement.apply(self.problem), self.objective)
                if bound < self.length_ms:
                    yield bound, placement

    def _look(self, placement: Placement) -> int:
        placed = placement.apply(self.problem)
        if not infeasibility(placed):
            try:
                tried = list(islice(STREAMS["adaoffload"](placed, self.objective), POLICIES))
            except OptPipeError:  # a policy that finds no way through proves nothing about the partition
                tried = []
            length_ms = min((value(schedule, self.objective) for schedule in tried), default=float("inf"))
            if length_ms < self.length_ms * (1 - 1e-9):
                self.placement, self.length_ms = placement, length_ms
        return POLICIES * 3 * len(placed.stages) * placed.microbatches


def partition_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule of any partition of the layers into looped or V-shaped chunks on the problem's devices is shorter, in
    ms.

    The devices together have all the work to do. The one that is d-th in line starts no sooner than d layers and hops
    after the first, and after its last input gradient as much is still to come. All micro-batches pass each layer,
    after the layers before it. One micro-batch passes all layers and all devices there and back. What layers hold over
    time has to fit into all devices' memory, each left to its own best choice (`_held`, 0 where activations do not
    leave in equally many parts).
    """
    problem = without_evictions(problem)
    layers, m, hop = problem.layers or (), problem.microbatches, problem.p2p_ms
    p = len({problem.stages[s].device for s in problem.all_routes[0]})
    if p > len(layers):
        return float("inf")  # there is no partition
    share = problem.overlap_factor or 1.0
    forward, backward, weight = (
        share * np.array([getattr(layer, f"{name}_ms") for layer in layers])
        for name in ("forward", "backward_input", "backward_weight")
    )
    whole = forward + backward + weight
    hops = hop * np.arange(p)
    arrives = np.concatenate(([0.0], np.cumsum(forward)))[:p] + hops
    leaves = np.concatenate(([0.0], np.cumsum(backward)))[:p] + hops + weight[0]
    once = forward.sum() + backward.sum() + 2 * hops[-1] + weight[0]
    held = m * _held(problem, layers, forward, backward, weight)
    if objective == "span":
        return float(max(once, m * whole.max(), m * whole.sum() / p, held / p))
    inputs = m * (forward + backward).sum() + leaves.sum()
    on, back = (np.cumsum(ms) - ms for ms in (forward, backward))  # what is passed before a layer
    one_layer = on + np.maximum(m * whole, m * (forward + backward) + back + weight[0])
    return float(max(once, one_layer.max(), (max(m * whole.sum(), inputs, held) + arrives.sum()) / p))


def _held(problem: Problem, layers: Sequence[StageCosts], forward: Floats, backward: Floats, weight: Floats) -> float:
    """The time that one micro-batch needs of all devices together, so that memory, link and compute suffice for its
    layers.

    A device that runs for T ms has T of link and T of compute, and its memory's bytes for T. Weights of the three,
    adding up to one, make of this one sum over all layers, each with the cheapest of its choices (`memory_bound` has
    the same of one device's stages). An activation is held from its stage's forward, which begins no later than the
    layer's own, to the stage's input gradient. Where stages leave in n parts, the largest k parts of a stage are no
    more than those of its layers, each cut into n.
    """
    parts = {layer.offload_parts for layer in layers if layer.can_offload} or {1}
    roomiest = max(1, *(problem.devices[stage.device].activation_budget_bytes for stage in problem.stages))
    if len(parts) > 1:
        return 0.0
    (n,) = parts
    steps = range(GRAIN + 1)
    memory, link, compute = np.array([(a, b, GRAIN - a - b) for a in steps for b in steps if a + b <= GRAIN]).T / GRAIN
    byte = memory / roomiest  # of a byte for a ms
    duplex = (
        1.0 if problem.transfer_mode == "half_duplex" else 0.5
    )  # full duplex: two links' time, each the busier one's at least
    turns = (forward + backward)[::-1].cumsum()[::-1]
    needed = compute * (forward + backward + weight).sum()
    for layer, ends, turn, last in zip(layers, forward + backward, turns, weight, strict=True):
        size, kept = layer.activation_bytes, layer.checkpoint_bytes or 0
        choices = [byte * size * turn]
        if layer.can_offload:
            carry = (layer.offload_ms or 0.0) + (layer.reload_ms or 0.0)
            whole, over = divmod(layer.offload_bytes or 0, n)
            for k in range(1, n + 1):
                gone = k * whole + min(k, over)
                choices.append(byte * (size * turn + gone * (ends + carry / n - turn)) + duplex * link * carry * k / n)
        if layer.can_recompute:
            again = layer.recompute_ms or 0.0
            choices.append(byte * (kept * turn + (size - kept) * (ends + again)) + compute * again)
        needed = needed + np.minimum.reduce(choices) + byte * min(size, layer.saved_for_weight_bytes) * last
    return float(needed.max())


def no_partition_fits(problem: Problem) -> str | None:
    """Why memory admits no schedule of any partition of the layers, where that can be shown at once."""
    problem = without_evictions(problem)
    devices = {stage.device for stage in problem.stages}
    memory = [problem.devices[d].activation_budget_bytes for d in devices]
    layers = problem.layers or ()
    if len(devices) > len(layers):
        return f"{len(layers)} layers cannot make a stage for each of {len(devices)} devices"
    largest = max(range(len(layers)), key=lambda k: layers[k].activation_bytes)
    if layers[largest].activation_bytes > max(memory):
        return (
            f"layers[{largest}] needs {layers[largest].activation_bytes} bytes and no device has more than "
            f"{max(memory)}"
        )
    stays = sum(_residual(layer) for layer in layers)
    if stays > sum(memory):
        return (
            f"one micro-batch leaves at least {stays} bytes on the devices, and all of them together have {sum(memory)}"
        )
    return None


def _residual(layer: StageCosts) -> int:
    """The bytes that stay on the device at least, between forward and backward."""
    offloaded = layer.activation_bytes - (layer.offload_bytes or 0)
    return min(offloaded, layer.checkpoint_bytes if layer.checkpoint_bytes is not None else offloaded)
