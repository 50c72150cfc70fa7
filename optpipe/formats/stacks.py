"""`STACKS`: what each training stack can run. A search for a stack is one for `Stack.restrict(problem)`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from optpipe.errors import OptPipeError
from optpipe.formats import export
from optpipe.model.ops import Kind
from optpipe.model.placement import MOST_CHUNKS, Shape
from optpipe.model.problem import Problem
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE, UPDATE, StageCosts, each_microbatch
from optpipe.schedule import Schedule

StackName = Literal["torch", "megatron", "primus", "optpipe"]
BACKWARDS = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})
COSTS_OF = {Kind.O: OFFLOAD, Kind.C: (*RECOMPUTE, "levels"), Kind.E: EVICTION, Kind.G: UPDATE}  # fields of a stage


@dataclass(frozen=True)
class Stack:
    """What a training stack can run.

    Attributes
    ----------
    own
        Published schedules that it makes itself, by our names: what each is called there.
    only_own
        Whether it runs no other schedules.
    kinds
        The kinds of ops that it has.
    pairs, parts
        Whether it runs two ops as a pair, and offloads an activation in several parts.
    shapes
        By the shape of a placement: the most stages a device.
    file
        What has a schedule for it: how the file's name ends, and the form of `export`.
    """

    own: Mapping[str, str]
    kinds: frozenset[Kind]
    shapes: Mapping[Shape, int]
    file: tuple[str, str]
    only_own: bool = False
    pairs: bool = True
    parts: bool = True

    @property
    def cannot(self) -> tuple[str, ...]:
        """The fields of stages that cost ops which it does not have."""
        return tuple(name for kind, names in COSTS_OF.items() if kind not in self.kinds for name in names)

    def places(self, chunks: int, shape: Shape) -> bool:
        """Whether its ranks can have so many stages each, of this shape."""
        return chunks <= self.shapes.get(shape, 0)

    def restrict(self, problem: Problem) -> Problem:
        """The problem without the ops that the stack does not have: each schedule of it is one of the problem."""
        lost: dict[str, Any] = dict.fromkeys(self.cannot)
        if not self.parts or Kind.O not in self.kinds:
            lost["offload_parts"] = 1

        def left(costs: StageCosts) -> StageCosts:
            return costs.model_copy(update=lost)

        layers = problem.layers and tuple(map(left, problem.layers))
        overlap = problem.overlap_factor if self.pairs else None
        return problem.replace(stages=tuple(map(left, problem.stages)), layers=layers, overlap_factor=overlap)

    def complaint(self, schedule: Schedule) -> str | None:
        """Why the stack cannot run a schedule; None if it can."""
        try:
            export(schedule, "megatron" if self.only_own else self.file[1])
        except OptPipeError as error:
            return str(error)
        return None


LOOPED = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
STACKS: dict[StackName, Stack] = {
    "torch": Stack(
        own={"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"},
        kinds=BACKWARDS,
        shapes={"looped": MOST_CHUNKS, "v": 2},
        file=(".csv", "torch-csv"),
    ),
    "megatron": Stack(
        own=LOOPED,
        kinds=frozenset({Kind.F, Kind.BW}),
        shapes={"looped": MOST_CHUNKS},
        file=(".json", "json"),  # optpipe_runtime.megatron.forward_backward_func runs it
        only_own=True,
        pairs=False,
    ),
    "primus": Stack(
        own=LOOPED,
        kinds=BACKWARDS | {Kind.O, Kind.D, Kind.R},
        shapes={"looped": MOST_CHUNKS, "v": MOST_CHUNKS},
        file=(".primus.json", "primus"),
        pairs=False,
        parts=False,
    ),
    "optpipe": Stack(
        own=LOOPED | {"zb-h1": "ZB-H1", "zb-h2": "ZB-H2", "zb-v": "ZB-V"},
        kinds=frozenset(Kind),
        shapes=dict.fromkeys(get_args(Shape), MOST_CHUNKS),
        file=(".json", "json"),
    ),
}


def with_whole_backwards(problem: Problem) -> Problem:
    """The problem whose B does all that BW does, and whose W does nothing: of each of its schedules
    `torch_memory.whole_backwards` makes one of `problem`, of the same length and with the same memory."""

    def whole(costs: StageCosts) -> StageCosts:
        backward = each_microbatch(operator.add, costs.backward_input_ms, costs.backward_weight_ms)
        return costs.model_copy(
            update={"backward_input_ms": backward, "backward_weight_ms": 0.0, "saved_for_weight_bytes": 0}
        )

    layers = problem.layers and tuple(map(whole, problem.layers))
    return problem.replace(stages=tuple(map(whole, problem.stages)), layers=layers, overlap_factor=None)
