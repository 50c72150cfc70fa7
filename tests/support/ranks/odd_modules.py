"""Modules as users write them: with states, functions and gradients of their own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.levels import FULL, LEVELS
from optpipe_runtime.stage.runner import StageRunner, learn
from optpipe_runtime.stage.split import weight_grads
from support.ranks.device import device

WIDTH, BATCH = 64, 3


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.layers, *inputs)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Doubled(torch.autograd.Function):
    """A function with a weight whose gradient waits for W, as users write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return dy * ctx.weight * 2, *weight_grads((ctx.weight,), lambda: ((dy * x * 2).sum((0, 1)),), x, dy)


class Plainly(Doubled):
    """The same by a user who has not heard of W."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return dy * ctx.weight * 2, (dy * x * 2).sum((0, 1))


class Raw(nn.Module):
    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape, dtype=dtype) / 8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight, x)


class Counting(nn.Module):
    """Its state changes in every forward, and its result with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.inner(x) * self.count.clone()
        return result


class Delaying(nn.Module):
    """Stands in for a layer of TransformerEngine with delay_wgrad_compute=True: a queue of its own, first in, first
    out, and a `.grad` that `backward_dw` sets; of the bias only where there is none yet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), nn.Parameter(torch.randn(WIDTH))
        self.pending: deque[tuple[Tensor, Tensor]] = deque()
        self.delays = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.delays:
            return functional.linear(x, self.weight, self.bias)
        result: Tensor = _Delays.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result

    def need_backward_dw(self) -> bool:
        return self.delays

    def backward_dw(self) -> None:
        x, dy = self.pending.popleft()
        self.weight.grad = dy.flatten(0, 1).t().mm(x.flatten(0, 1))
        if self.bias.grad is None:
            self.bias.grad = dy.flatten(0, 1).sum(0)


class _Delays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: Delaying) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return functional.linear(x, weight, bias).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.module.pending.append((x, dy))
        return dy.flatten(0, 1).mm(weight).view(x.shape), None, None, None


def offset(weight: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient is the output's own, the same tensor."""
    return torch.baddbmm(weight, x, x.transpose(1, 2) @ x / WIDTH)


def block(dropout: float = 0.1) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout, batch_first=True)


def checkpointed(reentrant: bool) -> nn.Module:
    def run(first: nn.Module, inner: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = last(checkpoint(inner, first(x), use_reentrant=reentrant))
        return result

    return Of(run, linear(), block(), linear())


def experts(weight: Tensor, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1).to(weight.dtype)
    ends = torch.tensor([len(rows) // 3, len(rows)], dtype=torch.int32, device=rows.device)
    return functional.grouped_mm(rows, weight, offs=ends).view(x.shape).float()


def slope(inner: nn.Module, x: Tensor) -> Tensor:
    """The loss contains a derivative, as of an energy."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (result,) = torch.autograd.grad(inner(at).sum(), at, create_graph=True)
    return result + x


def autocast(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        result: Tensor = inner(x)
    return result.float()


class Scaled(nn.Module):
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


def gated(norm: nn.Module) -> nn.Module:
    """What follows keeps more than the products of a norm need at W, so that it waits."""

    def run(norm: nn.Module, up: nn.Module, down: nn.Module, x: Tensor) -> Tensor:
        y = up(norm(x))
        result: Tensor = x + down(functional.silu(y) * torch.tanh(y) * torch.sigmoid(y))
        return result

    return Of(run, norm, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))


def many(words: nn.Module, conv: nn.Module, norm: nn.Module, mix: nn.Module, gate: nn.Module, x: Tensor) -> Tensor:
    x = conv(x + words(torch.arange(8, device=x.device)))
    result: Tensor = gate(torch.tanh(mix(torch.relu(torch.sigmoid(norm(x))))))
    return result


@cache
def _exported() -> nn.Module:
    layers = nn.Embedding(8, WIDTH), nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(WIDTH), linear()
    module = Of(many, *layers, gated(nn.RMSNorm(WIDTH))).to(device())
    # an export keeps the device on which it makes tensors
    return torch.export.export(module, (torch.zeros(BATCH, 8, WIDTH, device=device()),)).module()


def exported() -> nn.Module:
    return copy.deepcopy(_exported())


class Recurrent(nn.LSTM):
    """As torch's own layers it keeps its parameters in a list, too."""


class Sometimes(nn.Module):
    """A layer whose input is multiplied by what the module has. Zeros, by which it is learned, do not `change` it."""

    def __init__(
        self, change: Callable[[Sometimes, Tensor], Any], size: int = WIDTH, saves: bool = False, **attributes: Any
    ) -> None:
        """`saves`: whether the backward needs the buffer itself."""
        super().__init__()
        self.saves = saves
        self.layer, self.change, self.factor = linear(), change, torch.ones(())
        self.register_buffer("mean", torch.ones(size))
        self.register_buffer("variance", torch.ones(size))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().any():
            self.change(self, x.detach())
        mean = (self.mean if self.saves else self.mean.clone())[:WIDTH]
        result: Tensor = self.layer(x * mean * torch.as_tensor(self.factor).clone())
        return result

    def replace(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


# Stages of the tests of the split backward, and their ops one after the other

CPU = torch.device("cpu")
RECOMPUTED = {"C": FULL, "K": LEVELS["cheap"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(functional.gelu(self.wide(self.norm2(x))))
        return result


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, 8, WIDTH) for _ in range(count)]


def runner(module: nn.Module, link: Link, *batch: Tensor, loss: LossFn | None = None) -> StageRunner:
    """On a batch, which stays in memory, or on inputs that another stage made."""
    stage = StageRunner(0, module, CPU, link, HostPool(CPU), loss)
    learn(stage, batch or (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),), None if loss is None else ())
    stage.start_step(batch, 1)
    return stage


def run(stage: StageRunner, program: str, inputs: list[Tensor]) -> dict[int, Tensor]:
    """Ops as in "F0 B0 W0", by gradients of one; C and K are an F with its C, in full and cheap."""
    found: dict[int, Tensor] = {}
    for op in program.split():
        kind, j = op[:-1], int(op[-1])
        if kind == "F":
            stage.forward(j, (inputs[j].clone(),))
        elif kind in RECOMPUTED:
            stage.forward(j, (inputs[j].clone(),), recompute=RECOMPUTED[kind])
            stage.recompute(j)
        elif kind == "O":
            stage.offload(j, 0)
            stage.drop(j, 0)
            stage.reload(j, 0)
        elif kind == "W":
            stage.weight(j)
        else:
            (found[j],) = stage.backward(j, (torch.ones(BATCH, 8, WIDTH),), split=kind == "B")
    return found


def require_as_plain(module: nn.Module, plain: nn.Module, inputs: list[Tensor], found: dict[int, Tensor]) -> None:
    for j, x in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        torch.autograd.backward(plain(leaf), torch.ones_like(x))
        assert torch.equal(found[j], leaf.grad)  # type: ignore[arg-type]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
