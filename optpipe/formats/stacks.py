"""`STACKS`: what each training stack can run. A search for a stack is one for `Stack.restrict(problem)`, of whose
schedules it takes those without a `Stack.complaint`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from optpipe.errors import InputError
from optpipe.formats import megatron, primus, torch_csv
from optpipe.formats.torch_memory import as_torch_holds
from optpipe.model.ops import Kind
from optpipe.model.placement import MOST_CHUNKS, Shape
from optpipe.model.problem import Problem
from optpipe.model.program import of_kinds
from optpipe.model.records import EVICTION, OFFLOAD, RECOMPUTE, UPDATE, StageCosts, each_microbatch
from optpipe.options import SearchOptions, SolveOptions, StackName
from optpipe.schedule import Schedule

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
    require_stages, require_order
        Raise InputError if it has no such stages, or no such order of ops.
    keeps_until_weight
        Whether a B frees nothing (`as_torch_holds`).
    offloads_modules
        Whether it offloads what modules of layers save, by a policy of its own.
    """

    own: Mapping[str, str]
    kinds: frozenset[Kind]
    shapes: Mapping[Shape, int]
    file: tuple[str, str]
    require_stages: Callable[[Problem], object] = lambda _: None
    require_order: Callable[[Schedule], object] = lambda _: None
    only_own: bool = False
    pairs: bool = True
    parts: bool = True
    keeps_until_weight: bool = False
    offloads_modules: bool = False

    def places(self, chunks: int, shape: Shape) -> bool:
        """Whether its ranks can have so many stages each, of this shape."""
        return chunks <= self.shapes.get(shape, 0)

    def makes(self, method: str) -> bool:
        """Whether schedules of this method may be such that it runs them."""
        return not self.only_own or method in ("auto", *self.own)

    def restrict(self, problem: Problem, factor: float | None = None) -> Problem:
        """The problem without the ops that the stack does not have, micro-batches that differ in the order of their
        numbers, and with what it holds. Each schedule of it is one of the problem, its offloads in one part.

        Raises InputError if the stack has no such stages. `factor` is that of `as_torch_holds`.
        """
        self.require_stages(problem)
        lost: dict[str, Any] = {n: None for kind, names in COSTS_OF.items() if kind not in self.kinds for n in names}
        if not self.parts or Kind.O not in self.kinds:
            lost["offload_parts"] = 1

        def left(costs: StageCosts) -> StageCosts:
            levels = costs.levels
            if Kind.O not in self.kinds:
                levels = levels and tuple(level.model_copy(update=dict.fromkeys(OFFLOAD)) for level in levels)
            return costs.model_copy(update={"levels": levels, **lost})

        if self != STACKS["optpipe"]:
            problem = problem.replace(
                stages=tuple(map(left, problem.stages)),
                layers=problem.layers and tuple(map(left, problem.layers)),
                overlap_factor=problem.overlap_factor if self.pairs else None,
                fixed_order=problem.fixed_order or not problem.costs.are_equal,
            )
        return as_torch_holds(problem, factor) if self.keeps_until_weight else problem

    def complaint(self, schedule: Schedule) -> str | None:
        """Why the stack cannot run a schedule that is valid; None if it can."""
        try:
            self.require_stages(schedule.problem)
            self.require_order(schedule)
        except InputError as error:
            return str(error)
        if all(of_kinds(program.table, *self.kinds).all() for program in schedule.programs):
            return None
        return f"it has other ops than {', '.join(kind.name for kind in sorted(self.kinds))}"

    def first_fault(self, schedule: Schedule) -> str | None:
        """What is wrong with a schedule on its problem, or why the stack cannot run it; None if nothing is."""
        return next(iter(schedule.compiled.complaints), None) or self.complaint(schedule)


LOOPED = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
STACKS: dict[StackName, Stack] = {
    "torch": Stack(
        own={"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"},
        kinds=BACKWARDS,
        shapes={"looped": MOST_CHUNKS, "v": 2},
        file=(".csv", "torch-csv"),
        require_stages=torch_csv.require_stages,
        require_order=torch_csv.numbered,
        keeps_until_weight=True,
    ),
    "megatron": Stack(
        own=LOOPED | {"combined-1f1b": "combined 1F1B"},
        kinds=frozenset({Kind.F, Kind.BW}),
        shapes={"looped": MOST_CHUNKS},
        file=(".json", "json"),  # optpipe_runtime.megatron.forward_backward_func runs it
        require_stages=megatron.require_stages,
        require_order=megatron.require_order,
        only_own=True,
        offloads_modules=True,
    ),
    "primus": Stack(
        own=LOOPED,
        kinds=BACKWARDS | {Kind.O, Kind.D, Kind.R},
        shapes={"looped": MOST_CHUNKS, "v": 2},
        file=(".primus.json", "primus"),
        require_stages=primus.Chunks,
        require_order=primus.require_order,
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


def restricted(problem: Problem, options: SearchOptions) -> Problem:
    """The problem as the stack of the options runs it. Raises InputError if it has no such stages, or never runs what
    the method makes."""
    stack = STACKS[options.stack]
    if isinstance(options, SolveOptions) and not stack.makes(options.method):
        raise InputError(
            f"method = {options.method!r}: {options.stack} has its own schedules only: auto, {', '.join(stack.own)}"
        )
    return stack.restrict(problem)


def with_whole_backwards(problem: Problem) -> Problem:
    """The problem whose B does all that BW does, and whose W does nothing: of each of its schedules
    `torch_memory.whole_backwards` makes one of `problem`, of the same length and with the same memory."""

    def whole(costs: StageCosts) -> StageCosts:
        backward = each_microbatch(operator.add, costs.backward_input_ms, costs.backward_weight_ms)
        return costs.model_copy(
            update={"backward_input_ms": backward, "backward_weight_ms": 0.0, "saved_for_weight_bytes": 0}
        )

    layers = problem.layers and tuple(map(whole, problem.layers))
    return problem.replace(stages=tuple(map(whole, problem.stages)), layers=layers, overlap_factor=None, stack=None)
