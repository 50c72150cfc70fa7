"""A norm that is written out has a hook at its product with the weight, and only there. That such norms train as in a
plain run is in `test_odd_stages`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import Scaled, gated
from support.ranks.split_stages import batches, runner
from torch import Tensor

from optpipe.model.ops import Kind
from optpipe_runtime.memory.link import Link


class Own(torch.autograd.Function):
    """A product that no torch function shows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return weight * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        return (dy * x).sum((0, 1)), dy * weight


@pytest.mark.parametrize(
    "odd", [lambda w, x: x @ torch.diag(w), lambda w, x: Own.apply(w, x), lambda w, x: x + w.sum()]
)
def test_a_weight_that_is_used_otherwise_is_the_parameter(odd: Callable[[Tensor, Tensor], Tensor], link: Link) -> None:
    norm = Scaled()
    module, (x,) = gated(norm), batches(1)
    stage = runner(module, link)
    assert stage.split.calls is not None
    assert list(stage.split.calls.scaling) == [norm]
    norm.odd = odd  # type: ignore[assignment]
    plain, leaf = copy.deepcopy(module), x.clone().requires_grad_()
    torch.autograd.backward(plain(leaf), torch.ones_like(x))
    stage.forward(0, (x,), backward=Kind.B, captured=False)
    (dx,) = stage.backward(0, (torch.ones_like(x),), split=True)
    stage.weight(0)
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    for ours, theirs in [(dx, leaf.grad), *((one.grad, other.grad) for one, other in pairs)]:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "weight" not in vars(norm)
