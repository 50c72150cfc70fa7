"""What passes between stages: `StageIO` of one stage, learned, or derived for other shapes by `LearnedRoutes`; `enter`
makes what a stage gets a part of its graph.

A micro-batch of a shape that was never seen need not be learned if it lies between learned ones, and if each size of
what passes is the same in all of them, or in proportion to a size of the micro-batch. Where these explanations of a
size disagree about the new shape, or there is none, it is learned. So only a stage whose outputs neither stay nor grow
in proportion between two learned shapes could be derived wrongly, and its next message is then refused by its sender.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.torch_private.tensors import local, tree_leaves, tree_map_only

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Kwargs = dict[str, Any]  # what a stage gets by name from the batch, for a micro-batch or for all
LossFn = Callable[..., Tensor]  # (output, *targets) -> the loss of a micro-batch


class Spec(NamedTuple):
    """One tensor that passes between two stages. Its gradient comes back if `requires_grad`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def tensors_in(value: Any) -> Tensors:
    """The tensors in a value and in the tuples, lists and dicts that it is made of."""
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def clones(value: T) -> T:
    cloned: T = tree_map_only(Tensor, Tensor.clone, value)
    return cloned


def as_tensors(value: Any, what: str) -> Tensors:
    """What `what` returns, a tensor or a tuple of tensors, as a tuple. Raises `InputError` for anything else."""
    tensors = value if isinstance(value, tuple | list) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(f"{what} returns a {type(tensor).__name__}: it must return a tensor or a tuple of tensors")
        if isinstance(tensor, DTensor):
            raise InputError(
                f"{what} returns a DTensor: it must return this rank's part, as its last layer does with "
                "use_local_output=True"
            )
    return tuple(tensors)


@dataclass(frozen=True)
class StageIO:
    """What a stage gets and gives on one route, for each micro-batch. Tensors and blocks have numbers."""

    inputs: tuple[Spec, ...]  # without those of `kwargs`
    begins: bool  # the route begins here: the inputs are the batch
    ends: bool  # the route ends here: the output is the loss
    outputs: tuple[Spec, ...] = ()
    reached: tuple[frozenset[int], ...] = ()  # for each output, the inputs that its gradient reaches
    needed: tuple[int, ...] = ()  # the outputs whose gradients come back, because a later stage uses them for the loss
    changes_inputs: bool = False  # or the target, in place
    saved_outputs: frozenset[int] = frozenset()  # those that share memory with what the stage saves
    as_torch: bool = False  # torch's own graph of a forward saves no more than one with a split backward
    shared_blocks: frozenset[int] = frozenset()  # saved ones that something else holds: to offload them frees nothing
    block_bytes: tuple[int, ...] = ()  # of each saved block, 0 for one that stays on the device
    # Blocks that leave however small they are, because they are large in other shapes: so bytes follow from lengths.
    large_elsewhere: frozenset[int] = frozenset()

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """The numbers of the inputs whose gradients go back to the previous stage."""
        return tuple(sorted({i for k in self.needed for i in self.reached[k]}))

    @property
    def input_gradients(self) -> tuple[Spec, ...]:
        """What goes back to the previous stage."""
        return tuple(self.inputs[i] for i in self.asked)

    @property
    def output_gradients(self) -> tuple[Spec, ...]:
        """What comes back from the next stage."""
        return tuple(self.outputs[k] for k in self.needed)


def enter(inputs: Tensors, numbers: Sequence[int], gradients: list[dict[int, Tensor | None]]) -> Tensors:
    """The inputs, those of these numbers as part of a new graph whose backward appends their gradients to `gradients`.
    A leaf of the graph would do the same, but it would hold the input in memory."""
    if not numbers:
        return inputs
    token = torch.empty(0, device=inputs[0].device, requires_grad=True)
    entered = _Entrance.apply(token, gradients, numbers, *(inputs[k] for k in numbers))  # type: ignore[no-untyped-call]
    replaced = dict(zip(numbers, entered, strict=True))
    return tuple(replaced.get(k, tensor) for k, tensor in enumerate(inputs))


def reached_leaves(output: Tensor) -> Iterator[Tensor]:
    """The leaves of the graph that a gradient of the output may reach."""
    seen, waiting = {output.grad_fn}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        fresh = {after for after, _ in node.next_functions} - seen
        seen |= fresh
        waiting += fresh


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, gradients: list[dict[int, Tensor | None]], numbers: Sequence[int], *inputs: Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.numbers = gradients, numbers
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        parts = [None if gradient is None else local(gradient) for gradient in gradients]
        ctx.gradients.append(dict(zip(ctx.numbers, parts, strict=True)))
        return (None,) * (3 + len(gradients))


MOST_KEPT = 1024  # shapes of one kind; the oldest go first

Dimensions = tuple[int, ...]
RouteSpecs = tuple[StageIO, ...]  # of each stage of a route, in order


class Shape(NamedTuple):
    """Of one micro-batch: all that all ranks give to it."""

    kind: Hashable  # types, names and numbers of dimensions: what does not change with lengths
    sizes: Dimensions  # every dimension of every tensor


class _Rule(NamedTuple):
    """One explanation of a size: `size` where size `at` is `given`, and in proportion to it; of a constant `at` is
    None."""

    size: int
    given: int = 1
    at: int | None = None

    def of_sizes(self, sizes: Dimensions) -> Fraction:
        """Not of a shape that passes if it is no whole number."""
        return Fraction(self.size * (1 if self.at is None else sizes[self.at]), self.given)


class LearnedRoutes:
    """What passes on one route, for micro-batches of one kind."""

    def __init__(self) -> None:
        self._learned: dict[Dimensions, RouteSpecs] = {}
        self._derived = lru_cache(MOST_KEPT)(self._derive)  # since something was learned
        self._large: list[frozenset[int]] = []  # of each stage, the blocks that are large in any shape
        self._rules: list[list[_Rule]] | None = None  # None: nothing can be derived

    def add(self, sizes: Dimensions, passing: RouteSpecs) -> None:
        self._learned[sizes] = passing
        self._derived.cache_clear()
        if len(self._learned) > MOST_KEPT:
            del self._learned[next(iter(self._learned))]
        self._rules = self._explain()
        self._large = [
            frozenset(i for io in same_stage for i, nbytes in enumerate(io.block_bytes) if nbytes)
            for same_stage in zip(*self._learned.values(), strict=True)
        ]

    def find(self, sizes: Dimensions) -> RouteSpecs | None:
        """What passes for a shape; None if it must be learned."""
        return self._learned.get(sizes) or self._derived(sizes)

    def among_others(self, passing: RouteSpecs) -> RouteSpecs:
        """The same, in a step with micro-batches of other shapes."""
        return tuple(replace(io, large_elsewhere=large) for io, large in zip(passing, self._large, strict=True))

    def _derive(self, sizes: Dimensions) -> RouteSpecs | None:
        columns = zip(*self._learned, strict=True)
        if self._rules is None or any(not min(c) <= size <= max(c) for size, c in zip(sizes, columns, strict=True)):
            return None
        candidates = [{rule.of_sizes(sizes) for rule in rules} for rules in self._rules]
        if any(len(each) > 1 or max(each).denominator > 1 for each in candidates):
            return None
        return _resized(list(self._learned.values()), iter([int(max(each)) for each in candidates]))

    def _explain(self) -> list[list[_Rule]] | None:
        """All rules for each size of what passes: of the inputs and outputs of one stage after the other."""
        passings = list(self._learned.values())
        if len(passings) < 2 or len({_without_sizes(passing) for passing in passings}) > 1:
            return None
        given = list(enumerate(zip(*self._learned, strict=True)))
        all_rules = []
        every_size = [[n for io in p for spec in (*io.inputs, *io.outputs) for n in spec.shape] for p in passings]
        for column in zip(*every_size, strict=True):
            rules = [_Rule(column[0])] if len(set(column)) == 1 else []
            for at, sizes in given:
                if sizes[0] and all(a * sizes[0] == column[0] * b for a, b in zip(column, sizes, strict=True)):
                    rules.append(_Rule(column[0], sizes[0], at))
            all_rules.append(rules)
        return all_rules if all(all_rules) else None


def _without_sizes(passing: RouteSpecs) -> Hashable:
    """What must be equal for shapes to be derived from each other."""
    return tuple(
        (io.begins, io.ends, io.reached, io.needed, tuple((len(s.shape), *s[1:]) for s in (*io.inputs, *io.outputs)))
        for io in passing
    )


def _resized(learned: Sequence[RouteSpecs], sizes: Iterator[int]) -> RouteSpecs:
    """What passes with these sizes. What only costs memory or a copy is as in the least favourable shape."""
    derived = []
    for same_stage in zip(*learned, strict=True):
        io: StageIO = same_stage[0]
        inputs, outputs = (
            tuple(spec._replace(shape=tuple(next(sizes) for _ in spec.shape)) for spec in specs)
            for specs in (io.inputs, io.outputs)
        )
        derived.append(
            replace(
                io,
                inputs=inputs,
                outputs=outputs,
                changes_inputs=any(each.changes_inputs for each in same_stage),
                as_torch=all(each.as_torch for each in same_stage),
                saved_outputs=frozenset().union(*(each.saved_outputs for each in same_stage)),
                shared_blocks=frozenset().union(*(each.shared_blocks for each in same_stage)),
                block_bytes=(),
            )
        )
    return tuple(derived)


def extremes_first(shapes: Sequence[Shape]) -> list[Shape]:
    """The order in which to learn shapes: once the smallest and the largest are known, others may follow from them."""
    rising = sorted(shapes, key=lambda shape: (sum(shape.sizes), shape.sizes))
    return [*rising[:1], *rising[:0:-1]]
