"""Under autocast around a step each weight is cast once a step, for all micro-batches and all of their ops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import BATCH, WIDTH, linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.levels import FULL, LEVELS, Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split.hooked import Casts

CPU = torch.device("cpu")
M = 3


class Counting(TorchDispatchMode):
    """Counts casts of matrices of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.casts += "_to_copy" in str(func) and args[0].dtype == torch.float32 and args[0].shape == (WIDTH, WIDTH)
        return func(*args, **kwargs or {})


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, 8, WIDTH) for _ in range(M)]


def stage_of(module: nn.Module, link: Link) -> StageRunner:
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    with autocast():
        learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))
    stage.start_step((), 1)
    return stage


def step(stage: StageRunner, recompute: Level | None, split: bool) -> int:
    """All forwards, then all backwards; returns the number of casts."""
    with autocast(), Counting() as counting:
        outputs = [stage.forward(j, (x,), recompute=recompute)[0] for j, x in enumerate(inputs())]
        for j, y in enumerate(outputs):
            if recompute:
                stage.recompute(j)
            stage.backward(j, (torch.ones_like(y),), split)
            if split:
                stage.weight(j)
        return counting.casts


def plainly(module: nn.Module) -> list[Tensor]:
    with autocast():
        outputs = [module(x) for x in inputs()]
    for y in outputs:
        torch.autograd.backward(y, torch.ones_like(y))
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", [None, FULL, LEVELS["cheap"]], ids=["kept", "full", "cheap"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fused"])
def test_each_weight_is_cast_once_a_step(recompute: Level | None, split: bool, link: Link) -> None:
    module = nn.Sequential(linear(), nn.GELU(), linear())
    expected, stage = plainly(copy.deepcopy(module)), stage_of(module, link)
    for _ in range(2):
        module.zero_grad()
        assert step(stage, recompute, split) == 2
        assert all(map(torch.equal, [p.grad for p in module.parameters()], expected))  # type: ignore[arg-type]
        stage.end_step()
        assert stage.split.casts.nbytes == 2 * (WIDTH * WIDTH + WIDTH) * 2, "weights and biases"


def test_a_parameter_that_changes_is_cast_again() -> None:
    casts, weight = Casts(), linear().weight
    first = casts.cast(weight, torch.bfloat16)
    assert casts.cast(weight, torch.bfloat16) is first
    assert casts.cast(weight, torch.float32).data_ptr() == weight.data_ptr()
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(casts.cast(weight, torch.bfloat16), weight.bfloat16())
    weight.data.add_(1)  # as an optimizer on the host and FSDP do between two steps: no version counts it
    casts.clear()
    assert torch.equal(casts.cast(weight, torch.bfloat16), weight.bfloat16())


@pytest.mark.parametrize("recompute", [None, FULL, LEVELS["cheap"]], ids=["kept", "full", "cheap"])
def test_layers_that_are_not_split_keep_their_gradients(recompute: Level | None, link: Link) -> None:
    """torch's own cache may have been filled by a forward without gradients."""
    module = nn.Sequential(linear(), nn.Conv1d(8, 8, 1), nn.LayerNorm(WIDTH))
    module[0].weight.register_hook(lambda gradient: gradient)
    expected, stage = plainly(copy.deepcopy(module)), stage_of(module, link)
    step(stage, recompute, split=True)
    assert all(map(torch.equal, [p.grad for p in module.parameters()], expected))  # type: ignore[arg-type]
