"""Weight gradients that wait for W: what they hold, where plain autograd runs in their place, and what is an error.
That they have the bits of plain autograd, and that norms that are written out train as in a plain run, is in
`test_odd_stages`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import BATCH, WIDTH, Of, Scaled, gated, linear, slope
from support.ranks.split_stages import CPU, batches, require_as_plain, runner
from support.ranks.split_stages import run as run_ops
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6))
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    queue = run(module, torch.nested.nested_tensor(parts, layout=layout).requires_grad_())
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert not queue.held()


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
    """A norm that is written out has a hook at its product with the weight, and only there."""
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


# Errors


def test_a_stage_that_takes_gradients_itself_is_not_split(link: Link) -> None:
    """The second half of a derivative would be lost."""
    module = Of(slope, nn.Sequential(nn.Conv1d(8, 8, 1), linear(), nn.Tanh()))
    plain, x = copy.deepcopy(module), batches(1)[0].requires_grad_()
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    learn(stage, (x,))
    require_as_plain(module, plain, [x.detach()], run_ops(stage, "F0 B0 W0", [x.detach()]))
    assert stage.split.at_b == {name for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layer", [linear, lambda: nn.LayerNorm(WIDTH)])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fused"])
@pytest.mark.parametrize("known", [True, False])
def test_a_weight_changed_after_its_use_is_an_error(
    layer: Callable[[], nn.Module], split: bool, known: bool, link: Link
) -> None:
    """As by autograd. The input's gradient would be that of another weight."""

    def run(inner: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = inner(x)
        with torch.no_grad():
            inner.weight.mul_(0.5)  # type: ignore[operator]
        return y

    stage = runner(Of(run, layer()), link)
    stage.split.norms_wait = True
    backward = (Kind.B if split else Kind.BW) if known else None
    stage.forward(0, (batches(1)[0],), backward=backward, captured=not known)
    with pytest.raises(
        InputError, match=r"^a tensor of shape \[64.*\] was changed in place after it was saved for the backward"
    ):
        stage.backward(0, (torch.ones(BATCH, 8, WIDTH),), split=split)


def test_a_gradient_that_is_differentiated_again_only_later_is_an_error(link: Link) -> None:
    """Layers that are hooked by then would leave out a part of their weight's gradient."""
    later = []

    def run(inner: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = inner(x * 1)
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0] if later else y

    stage = runner(Of(run, linear()), link)
    stage.forward(0, (batches(1)[0],), backward=Kind.B, captured=False)
    stage.backward(0, (torch.ones(BATCH, 8, WIDTH),), split=True)
    stage.weight(0)
    assert "forward" not in vars(stage.module.get_submodule("layers.0"))
    later.append(True)
    with pytest.raises(InputError, match=r"^a gradient is to be differentiated again, through a linear layer"):
        stage.forward(1, (batches(1)[0],), backward=Kind.B, captured=False)
