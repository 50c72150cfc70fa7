"""Weight gradients that wait for W: what they hold, and where plain autograd runs in their place. That they have the
bits of plain autograd is in `test_odd_stages`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optpipe_runtime.stage.split import WeightQueue
from optpipe_runtime.stage.split.mode import Splitting


def run(module: nn.Module, x: Tensor, norms: bool = True, deferring: bool = True) -> WeightQueue:
    """F and B; what is left to W."""
    queue = WeightQueue()
    queue.deferring = deferring
    with Splitting(norms=norms):
        y = module(x)
    with queue.filling():
        torch.autograd.backward(parts := y.unbind() if y.is_nested else [y], [torch.ones_like(part) for part in parts])
    return queue


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (8,)])
def test_linear_layers_wait_for_w(shape: tuple[int, ...]) -> None:
    """And their gradients are added to those that are there."""
    module, x = nn.Linear(8, 6), torch.randn(shape)
    queue = run(module, x.requires_grad_())
    assert module.weight.grad is None
    assert module.bias.grad is None
    assert sum(queue.held().values()) == 4 * x.numel() * (8 + 6) // 8, "input and gradient"
    module.weight.grad = torch.ones(6, 8)
    queue.run()
    torch.testing.assert_close(module.weight.grad, 1 + x.reshape(-1, 8).sum(0).expand(6, 8))
    torch.testing.assert_close(module.bias.grad, torch.full((6,), x.numel() / 8))
    assert not queue.held()


@pytest.mark.parametrize("shape", [(8,), (5, 8)])
def test_layer_norms_wait_for_w_if_they_may(shape: tuple[int, ...]) -> None:
    module, x = nn.LayerNorm(shape), torch.randn(3, 8, 5).transpose(1, 2).requires_grad_()
    queue = run(module, x)
    assert module.weight.grad is None
    assert sum(queue.held().values()) == 4 * (2 * 120 + 2 * (120 // torch.zeros(shape).numel())), (
        "input, gradient, mean and deviation"
    )
    assert not run(module, x, norms=False).held()
    assert module.weight.grad is not None


def test_gradients_come_at_once_outside_a_pipeline() -> None:
    module = nn.Sequential(nn.Conv1d(5, 5, 1), nn.Linear(8, 6))
    with Splitting():
        y = module(torch.randn(2, 5, 8))
    torch.autograd.backward(y.sum())
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6))
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    queue = run(module, torch.nested.nested_tensor(parts, layout=layout).requires_grad_())
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert not queue.held()
