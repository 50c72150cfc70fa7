"""Weight gradients of RMS norms, and of ops as torch.export writes them, wait for W, and are those of a plain run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe.model.ops import Kind
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner

CPU, WIDTH = torch.device("cpu"), 16


class Written(nn.Module):
    """An RMS norm as Llama's in transformers; with `plus_one` as Gemma's. An `odd` one uses the weight otherwise."""

    def __init__(self, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.plus_one, self.odd = plus_one, None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.odd is not None:
            return self.weight * self.odd(self.weight, hidden)
        result: Tensor = hidden * (1.0 + self.weight.float()) if self.plus_one else self.weight * hidden
        return result


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


class Gated(nn.Module):
    """What follows keeps more than the products of a norm need at W."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        result: Tensor = x + self.down(functional.silu(y) * torch.tanh(y) * torch.sigmoid(y))
        return result


class Many(nn.Module):
    """The ops of a stage with their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv, self.norm = nn.Embedding(7, WIDTH), nn.Conv1d(3, 3, 3, padding=1), nn.LayerNorm(WIDTH)
        self.mix, self.rms = nn.Parameter(torch.rand(WIDTH, WIDTH)), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x + self.words(torch.arange(3)))
        return x + self.rms(torch.tanh(torch.matmul(torch.relu(self.norm(x)), self.mix)))


def exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.zeros(2, 3, WIDTH),)).module()


KINDS = {
    "nn.RMSNorm": lambda: Gated(nn.RMSNorm(WIDTH)),
    "as Llama's": lambda: Gated(Written()),
    "as Gemma's": lambda: Gated(Written(plus_one=True)),
    "exported": lambda: exported(Gated(nn.RMSNorm(WIDTH))),
    "exported, many ops": lambda: exported(Many()),
}


@contextmanager
def learned(module: nn.Module) -> Iterator[StageRunner]:
    link = Link(CPU, full_duplex=False)
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    learn(stage, (torch.randn(2, 3, WIDTH, requires_grad=True),))
    yield stage
    link.close()


def gradients(stage: StageRunner, x: Tensor, dy: Tensor, backward: Kind, captured: bool) -> dict[str, Tensor]:
    """By op and by op: those of the parameters, and of the input."""
    stage.module.zero_grad()
    stage.start_step((), 1)
    stage.forward(0, (x.clone(),), backward=backward, captured=captured)
    (dx,) = stage.backward(0, (dy,), split=backward == Kind.B)
    if backward == Kind.B:
        stage.weight(0)
    stage.end_step()
    found = {name: p.grad.clone() for name, p in stage.module.named_parameters() if p.grad is not None}
    return found | {"input": dx}


def plain(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    given = x.clone().requires_grad_()
    module(given).backward(dy)
    assert given.grad is not None
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return found | {"input": given.grad}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_wait_and_are_those_of_a_plain_run(kind: str) -> None:
    """To the bit, with and without hooks on what autograd saves, by B and W and by BW."""
    torch.manual_seed(1)
    module = KINDS[kind]()
    x, dy = torch.randn(2, 2, 3, WIDTH)
    expected = plain(module, x, dy)
    assert len(expected) == 1 + len(list(module.parameters()))
    with learned(module) as stage:
        if kind != "exported, many ops":
            assert stage.norms_wait
            stage.forward(0, (x,))
            kept = stage.held_bytes(0)
            stage.backward(0, (dy,), split=True)
            assert stage.held_bytes(0) <= kept
            stage.weight(0)
        stage.norms_wait = True
        for captured in (True, False):
            for backward in (Kind.B, Kind.BW):
                found = gradients(stage, x, dy, backward, captured)
                assert found.keys() == expected.keys()
                for name, gradient in expected.items():
                    assert torch.equal(found[name], gradient), (name, captured, backward)
        assert stage.at_b == frozenset()


@pytest.mark.parametrize("kind", ["nn.RMSNorm", "as Llama's", "exported"])
def test_norms_do_not_wait_where_that_takes_memory(kind: str) -> None:
    """A norm alone keeps less at F than its products need at W."""
    norm: nn.Module = Written() if kind == "as Llama's" else nn.RMSNorm(WIDTH)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
    module = exported(module) if kind == "exported" else module
    x, dy = torch.randn(2, 2, 3, WIDTH)
    expected = plain(module, x, dy)
    with learned(module) as stage:
        waits = stage.norms_wait
        found = gradients(stage, x, dy, Kind.B, captured=False)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        assert stage.at_b == (frozenset() if waits else {"1.weight"})


@pytest.mark.parametrize(
    "odd", [lambda w, x: x @ torch.diag(w), lambda w, x: Own.apply(w, x), lambda w, x: x + w.sum()]
)
def test_a_weight_that_is_used_otherwise_is_the_parameter(odd: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Gated(Written())
    x, dy = torch.randn(2, 2, 3, WIDTH)
    with learned(module) as stage:
        assert stage.calls is not None
        assert list(stage.calls.scaling) == [module.norm]
        module.norm.odd = odd
        expected = plain(module, x, dy)
        found = gradients(stage, x, dy, Kind.B, captured=False)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    assert "weight" not in vars(module.norm)
