"""What a split backward cannot do, or what autograd refuses, too: each is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.ranks.odd_modules import BATCH, WIDTH, Of, linear, slope
from support.ranks.split_stages import CPU, batches, runner
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner


def test_a_derivative_through_a_split_graph_is_refused(link: Link) -> None:
    """Its second half would be lost, and nobody would know."""
    stage = StageRunner(0, Of(slope, nn.Sequential(nn.Conv1d(8, 8, 1), nn.Tanh())), CPU, link, HostPool(CPU))
    with pytest.raises(InputError, match=r"^a gradient is to be differentiated again, through conv1d"):
        learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))


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
