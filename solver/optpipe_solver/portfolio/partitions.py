"""Which layers make a stage: the partition that the problem's own stages are, and a descent to better ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, permutations

import numpy as np

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, length_ms, shorter
from optpipe.model.arrays import Floats
from optpipe.model.placement import Placement, Shape
from optpipe.model.problem import Problem
from optpipe.model.records import COMPUTE_MS, StageCosts
from optpipe.process.protocol import Request
from optpipe_solver import tuning
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS

ROUNDING = 0.01  # of a sum: stages and their layers may be measured apart
SHAPES: tuple[Shape, ...] = ("looped", "v")


def partition_of_stages(problem: Problem) -> Placement | None:
    """Find the placement that the problem's own stages are; None unless they are whole layers, alike on each device."""
    stages = [problem.stages[s] for s in problem.all_routes[0]]
    devices = [stage.device for stage in stages]
    chunks = len(stages) // len(set(devices))
    shape = next(
        (shape for shape in SHAPES if chunks <= 64 and Placement(chunks=chunks, shape=shape).order(problem) == devices),
        None,
    )
    layers, ends = problem.layers or (), [0]
    m = problem.microbatches
    reached = [np.zeros((4, m)), *accumulate(_figures(layer, m) for layer in layers)]
    for total in accumulate(_figures(stage, m) for stage in stages):
        end = next((k for k in range(ends[-1] + 1, len(reached)) if np.allclose(reached[k], total, rtol=1e-6)), None)
        if end is None:
            return None
        ends.append(end)
    if shape is None or ends[-1] != len(layers):
        return None
    return Placement(chunks=chunks, shape=shape, layers=tuple(np.diff(ends).tolist()))


def mismatch(problem: Problem) -> str | None:
    """Say where layers and stages do not add up to the same model for some micro-batch; None if they do."""
    names = *COMPUTE_MS, "activation_bytes", "saved_for_weight_bytes"
    for name in names[:-1] if problem.stack else names:  # a stage and its layers may differ in what torch holds till W
        layers, stages = (
            np.sum([np.broadcast_to(getattr(costs, name), problem.microbatches) for costs in these], axis=0)
            for these in (problem.layers or (), problem.stages)
        )
        rounded = len(problem.stages) if name.endswith("_bytes") else 0
        differs = np.flatnonzero(abs(layers - stages) > ROUNDING * np.maximum(layers, stages) + rounded)
        if differs.size:
            j = int(differs[0])
            of_one = "" if np.ptp(layers) == np.ptp(stages) == 0 else f" of micro-batch {j}"
            sums = f"{layers[j]:.6g}, those of the stages to {stages[j]:.6g}"
            why = "the stages given must be made of these layers, or kept (placements = keep)"
            return f"layers: their {name}{of_one} add up to {sums}; {why}"
    return None


def _figures(costs: StageCosts, microbatches: int) -> Floats:
    """(4, m) what distinguishes layers."""
    figures = costs.forward_ms, costs.backward_input_ms, costs.backward_weight_ms, costs.activation_bytes
    return np.array([np.broadcast_to(figure, microbatches) for figure in figures], dtype=float)


def improve_partitions(request: Request, starts: Sequence[Placement], clock: Clock) -> list[Placement]:
    """Descend from each partition, then go on with the best third, until time is up.

    Returns the best partition of each descent.
    """
    descents = [PartitionDescent(request.problem, request.objective, start, request.seed) for start in starts]
    for count in (len(descents), -(-len(descents) // 3)):
        for descent in sorted(descents, key=lambda descent: descent.length_ms)[:count]:
            turn = clock.share(1 / 2 / count)
            for ops in descent.steps:
                turn.count(ops)
                if turn.over:
                    break
    return [descent.placement for descent in descents]


class PartitionDescent:
    """Local search from a partition to a better neighbour, as long as there is one.

    In a neighbour one stage has a layer less, another one more, and those between are shifted. A partition is as good
    as the best simulated schedule of a few policies of AdaOffload, which respects the memory. Each of the `steps`
    judges one partition, and yields how many compute ops were handled for it.
    """

    def __init__(self, problem: Problem, objective: Objective, placement: Placement, seed: int = 0) -> None:
        self.problem, self.objective, self.placement, self.seed = problem, objective, placement, seed
        self.length_ms = NO_SCHEDULE_MS
        self.steps = self._descend()

    def _descend(self) -> Iterator[int]:
        yield self._judge(self.placement)
        while True:
            before_ms = self.length_ms
            for _, neighbour in sorted(self._neighbours(), key=lambda pair: pair[0]):
                yield self._judge(neighbour)
                if self.length_ms < before_ms:
                    break
            else:
                return

    def _neighbours(self) -> Iterator[tuple[float, Placement]]:
        """Yield the neighbours that may have a shorter schedule, with lower bounds."""
        counts = self.placement.layers or ()
        pairs = list(permutations(range(len(counts)), 2))
        if len(pairs) > tuning.PARTITION_MOVES:
            pairs = random.Random(self.seed).sample(pairs, tuning.PARTITION_MOVES)
        for less, more in pairs:
            if counts[less] > 1:
                moved = list(counts)
                moved[less] -= 1
                moved[more] += 1
                placement = self.placement.model_copy(update={"layers": tuple(moved)})
                bound = trivial_bound(placement.apply(self.problem), self.objective)
                if bound < self.length_ms:
                    yield bound, placement

    def _judge(self, placement: Placement) -> int:
        placed = placement.apply(self.problem)
        if not infeasibility(placed):
            try:
                tried = list(islice(STREAMS["adaoffload"](placed, self.objective), tuning.PARTITION_POLICIES))
            except OptPipeError:  # a policy that finds no way through proves nothing about the partition
                tried = []
            length = min((length_ms(schedule, self.objective) for schedule in tried), default=NO_SCHEDULE_MS)
            if shorter(length, self.length_ms):
                self.placement, self.length_ms = placement, length
        return tuning.PARTITION_POLICIES * 3 * len(placed.stages) * placed.microbatches
