"""`StageIO`: the tensors that a stage gets and gives; `enter` makes those that it gets a part of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.torch_private.trees import tree_leaves, tree_map_only

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
    """The same value with clones of its tensors."""
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
    """What a stage gets and gives on one route, for each micro-batch.

    Attributes
    ----------
    inputs
        The tensors that the stage gets, without those of `kwargs`.
    begins
        Whether the route begins here: the inputs are then the batch.
    ends
        Whether the route ends here: the output is then the loss.
    outputs
        The tensors that it gives to the next stage.
    reached
        For each output, the numbers of the inputs that its gradient reaches.
    needed
        The numbers of the outputs whose gradients come back: those that require one and that a later stage uses for
        the loss.
    changes_inputs
        Whether the forward changes its inputs, or the target, in place.
    saved_outputs
        The numbers of the outputs that share memory with what the stage saves.
    as_torch
        Whether torch's own graph of a forward saves no more than one with a split backward.
    shared_blocks
        The numbers of the saved blocks that something else holds, too, so that offloading them frees nothing.
    block_bytes
        The bytes of each saved block, 0 for one that stays on the device.
    large_elsewhere
        The numbers of the blocks that leave however small they are, because they are large in other shapes. So bytes
        follow from lengths.
    """

    inputs: tuple[Spec, ...]
    begins: bool
    ends: bool
    outputs: tuple[Spec, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    needed: tuple[int, ...] = ()
    changes_inputs: bool = False
    saved_outputs: frozenset[int] = frozenset()
    as_torch: bool = False
    shared_blocks: frozenset[int] = frozenset()
    block_bytes: tuple[int, ...] = ()
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


def enter(inputs: Tensors, numbers: list[int], gradients: list[dict[int, Tensor | None]]) -> Tensors:
    """The inputs, those of these numbers as part of a new graph whose backward appends their gradients to `gradients`.

    A leaf of the graph would do the same, but it would hold the input in memory.
    """
    if not numbers:
        return inputs
    token = torch.empty(0, device=inputs[0].device, requires_grad=True)
    entered = _Entrance.apply(token, gradients, numbers, *(inputs[k] for k in numbers))  # type: ignore[no-untyped-call]
    replaced = dict(zip(numbers, entered, strict=True))
    return tuple(replaced.get(k, tensor) for k, tensor in enumerate(inputs))


def reached_inputs(output: Tensor, inputs: Tensors) -> frozenset[int]:
    """The numbers of the inputs, which are leaves of the graph, that a gradient of the output may reach."""
    number = {id(tensor): i for i, tensor in enumerate(inputs)}
    return frozenset(number[id(leaf)] for leaf in reached_leaves(output) if id(leaf) in number)


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
        ctx: Any, token: Tensor, gradients: list[dict[int, Tensor | None]], numbers: list[int], *inputs: Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.numbers = gradients, numbers
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        parts = [None if gradient is None else local(gradient) for gradient in gradients]
        ctx.gradients.append(dict(zip(ctx.numbers, parts, strict=True)))
        return (None,) * (3 + len(gradients))
