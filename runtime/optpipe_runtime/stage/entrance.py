"""The inputs of a stage as part of its autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.io import Tensors


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
