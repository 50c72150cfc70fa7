"""Which layers make a stage: the partition that the given stages are, better and better ones, and what holds for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, permutations

import numpy as np

from optpipe.child import Objective
from optpipe.errors import OptPipeError
from optpipe.placement import Placement, Shape
from optpipe.problem import Device, Problem, Stage, StageCosts
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.floor import infeasibility
from optpipe_solver.heuristics import STREAMS, value

POLICIES = 6  # of AdaOffload that judge a partition
MOST_MOVES = 240  # from one partition; of more a sample is tried

SHAPES: tuple[Shape, ...] = ("looped", "v")


def given(problem: Problem) -> Placement | None:
    """The placement that the problem's own stages are, if they are whole layers in equally many chunks a device."""
    stages = [problem.stages[s] for s in problem.all_routes[0]]
    devices = [stage.device for stage in stages]
    chunks = len(stages) // len(set(devices))
    shape = next((shape for shape in SHAPES if chunks <= 64 and Placement(chunks=chunks, shape=shape).order(problem) == devices), None)
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


def _figures(costs: StageCosts) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([costs.forward_ms, costs.backward_input_ms, costs.backward_weight_ms, costs.activation_bytes], dtype=float)


@dataclass
class Climb:
    """From one partition to a better neighbour, as long as there is one: a layer less for one stage, one more for another, those between
    shifted. A partition is as good as the best simulated schedule of a few policies of AdaOffload, which knows the memory."""

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
    """No schedule of any partition of the layers into looped or V-shaped chunks on the problem's devices is shorter, in ms.

    The devices together have all the work to do. The one that is d-th in line starts no sooner than d layers and hops after the first, and
    after its last input gradient as much is still to come. All micro-batches pass each layer, after the layers before it. One micro-batch
    passes all layers and all devices there and back. The same for bytes over time (`memory_bound`): what layers hold at least, each left
    to its own best choice, has to fit into all devices' memory. That argument needs activations that leave in equally many parts, and is
    left out where they do not.
    """
    layers, m, hop = problem.layers or (), problem.microbatches, problem.p2p_ms
    p = len({problem.stages[s].device for s in problem.all_routes[0]})
    share = problem.overlap_factor or 1.0
    forward, backward, weight = (
        share * np.array([getattr(layer, f"{name}_ms") for layer in layers]) for name in ("forward", "backward_input", "backward_weight")
    )
    whole = forward + backward + weight
    hops = hop * np.arange(p)
    arrives = np.concatenate(([0.0], np.cumsum(forward)))[:p] + hops
    leaves = np.concatenate(([0.0], np.cumsum(backward)))[:p] + hops + weight[0]
    once = forward.sum() + backward.sum() + 2 * hops[-1] + weight[0]
    held = m * _held(problem, layers, share)
    if objective == "span":
        return float(max(once, m * whole.max(), m * whole.sum() / p, held / p))
    inputs = m * (forward + backward).sum() + leaves.sum()
    on, back = (np.cumsum(ms) - ms for ms in (forward, backward))  # what is passed before a layer
    one_layer = on + np.maximum(m * whole, m * (forward + backward) + back + weight[0])
    return float(max(once, one_layer.max(), (max(m * whole.sum(), inputs, held) + arrives.sum()) / p))


def _held(problem: Problem, layers: tuple[StageCosts, ...], share: float) -> float:
    """The time that one micro-batch needs on one device with the greatest memory of all, each layer a stage; 0 where nothing is known."""
    if len({layer.offload_parts for layer in layers if layer.can_offload}) > 1:
        return 0.0
    alone = [
        {
            **layer.model_dump(exclude_none=True),
            "device": 0,
            **{name: share * getattr(layer, name) for name in ("forward_ms", "backward_input_ms", "backward_weight_ms")},
        }
        for layer in layers
    ]
    roomiest = max(problem.devices[s.device].memory_bytes for s in problem.stages)
    try:
        together = Problem(
            microbatches=1,
            transfer_mode=problem.transfer_mode,
            devices=(Device(memory_bytes=roomiest),),
            stages=tuple(Stage(**fields) for fields in alone),
        )
    except ValueError:
        return 0.0
    return memory_bound(together, "span")


def no_partition_fits(problem: Problem) -> str | None:
    """Why memory admits no schedule of any partition of the layers, where that can be shown at once."""
    devices = {stage.device for stage in problem.stages}
    memory = [problem.devices[d].memory_bytes for d in devices]
    layers = problem.layers or ()
    largest = max(range(len(layers)), key=lambda k: layers[k].activation_bytes)
    if layers[largest].activation_bytes > max(memory):
        return f"layers[{largest}] needs {layers[largest].activation_bytes} bytes and no device has more than {max(memory)}"
    stays = sum(_residual(layer) for layer in layers)
    if stays > sum(memory):
        return f"one micro-batch leaves at least {stays} bytes on the devices, and all of them together have {sum(memory)}"
    return None


def _residual(layer: StageCosts) -> int:
    """The bytes that stay on the device at least, between forward and backward."""
    offloaded = layer.activation_bytes - (layer.offload_bytes or 0)
    return min(offloaded, layer.checkpoint_bytes if layer.checkpoint_bytes is not None else offloaded)
