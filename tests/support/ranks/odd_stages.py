"""Stages as users write them, for the tests."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from optpipe_runtime.stage.split import weight_grads

WIDTH, BATCH = 64, 3


class Of(nn.Module):
    """A function of layers and inputs."""

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
    """A function of a parameter and the input."""

    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape, dtype=dtype) / 8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight, x)


class Adapted(nn.Module):
    """LoRA: a frozen base, adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            linear().requires_grad_(False),
            nn.Linear(WIDTH, 4, bias=False),
            nn.Linear(4, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


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


class Replacing(Counting):
    """Its state is another tensor after every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        result: Tensor = self.inner(x) * self.count
        return result


class Averaging(Counting):
    """Its state becomes another unless the input is zero, as where the stage is learned."""

    def forward(self, x: Tensor) -> Tensor:
        self.count.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        result: Tensor = self.inner(x) + self.count.clone()
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
    """The ops of a stage with their parameters."""
    x = conv(x + words(torch.arange(8, device=x.device)))
    result: Tensor = gate(torch.tanh(mix(torch.relu(torch.sigmoid(norm(x))))))
    return result


@cache
def _exported() -> nn.Module:
    layers = nn.Embedding(8, WIDTH), nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(WIDTH), linear()
    module = Of(many, *layers, gated(nn.RMSNorm(WIDTH)))
    return torch.export.export(module, (torch.zeros(BATCH, 8, WIDTH),)).module()


def exported() -> nn.Module:
    """As torch.export writes it."""
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


SOMETIMES: dict[str, Callable[[], nn.Module]] = {
    "a buffer in place": lambda: Sometimes(lambda own, x: own.mean.mul_(0.9).add_(x.mean())),
    "a large buffer in place": lambda: Sometimes(lambda own, x: own.mean.mul_(0.9), size=20_000),
    "a buffer by its data": lambda: Sometimes(lambda own, x: own.mean.data.mul_(0.9)),
    "a large buffer by its data": lambda: Sometimes(lambda own, x: own.mean.data.mul_(0.9), size=20_000),
    "a buffer replaced": lambda: Sometimes(lambda own, x: own.replace(mean=own.mean * 0.9)),
    "running means without a counter": lambda: Sometimes(
        lambda own, x: functional.batch_norm(x.flatten(0, 1), own.mean, own.variance, training=own.training)
    ),
    "an attribute in place": lambda: Sometimes(lambda own, x: own.factor.mul_(0.9)),
    "an attribute replaced": lambda: Sometimes(lambda own, x: own.replace(factor=own.factor * 0.9)),
    "an attribute that begins as None": lambda: Sometimes(
        lambda own, x: own.replace(last=x.mean(), factor=1.0 if own.last is None else own.last), last=None
    ),
    "a number": lambda: Sometimes(lambda own, x: own.replace(factor=own.factor * 0.9), factor=1.0),
    "a list": lambda: Sometimes(
        lambda own, x: (own.means.append(x.mean()), own.replace(factor=sum(own.means))), means=[torch.ones(())]
    ),
    "a dict": lambda: Sometimes(lambda own, x: own.means.update(a=own.means["a"] * 0.9), means={"a": torch.ones(())}),
    "a generator of its own": lambda: Sometimes(
        lambda own, x: own.replace(factor=torch.rand((), generator=own.generator)), generator=torch.Generator()
    ),
    "Python's random numbers": lambda: Sometimes(lambda own, x: own.replace(factor=random.random())),
    "a large list": lambda: Sometimes(
        lambda own, x: (own.means[0].data.mul_(0.9), own.replace(factor=own.means[0][0].item())),
        means=[torch.ones(20_000), *[0] * 3],
    ),
    "a long list": lambda: Sometimes(
        lambda own, x: (own.last.append([x.mean()]), own.replace(factor=float(len(own.last)))), last=[[1.0]] * 100
    ),
    "a list of itself": lambda: Sometimes(
        lambda own, x: (own.last.append(own.last), own.replace(factor=float(len(own.last)))), last=[]
    ),
    "a deque": lambda: Sometimes(
        lambda own, x: (own.last.append(x.mean()), own.replace(factor=sum(own.last))), last=deque([1.0], maxlen=2)
    ),
    "numpy's random numbers": lambda: Sometimes(lambda own, x: own.replace(factor=float(np.random.rand()))),
}
# A backward needs what the next forward changes, so these train only with each backward behind its forward.
SAVED: dict[str, Callable[[], nn.Module]] = {
    "a saved buffer in place": lambda: Sometimes(lambda own, x: own.mean.mul_(0.9), saves=True),
    "a saved buffer by its data": lambda: Sometimes(lambda own, x: own.mean.data.mul_(0.9), saves=True),
    "a large saved buffer in place": lambda: Sometimes(lambda own, x: own.mean.mul_(0.9), saves=True, size=20_000),
    "a large saved buffer by its data": lambda: Sometimes(
        lambda own, x: own.mean.data.mul_(0.9), saves=True, size=20_000
    ),
}
STAGES: dict[str, Callable[[], nn.Module]] = {
    "in place at entry": lambda: nn.Sequential(nn.ReLU(inplace=True), linear()),
    "adds in place at entry": lambda: Of(lambda f, x: f(x.add_(1)), linear()),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(8), linear(), nn.BatchNorm1d(8)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(linear()), nn.ReLU(inplace=True), linear()),
    "weight norm": lambda: nn.Sequential(weight_norm(linear()), nn.Tanh()),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()),
    "identity": nn.Identity,
    "a view": lambda: Of(lambda f, x: f(x).transpose(1, 2), linear()),
    "a slice": lambda: Of(lambda f, x: f(x)[..., 1:5], linear()),
    "expanded": lambda: Of(lambda f, x: f(x).mean(1, keepdim=True).expand(x.shape), linear()),
    "an input passed on": lambda: Of(lambda f, x: (f(x), x), linear()),
    "an output twice": lambda: Of(lambda f, x: (f(x),) * 2, linear()),
    "integers beside": lambda: Of(lambda f, x: (f(x), x.argmax(-1), x > 0), linear()),
    "other types": lambda: Of(lambda f, x: (f(x.double()).float(), x.bfloat16()), linear().double()),
    "a weight twice": lambda: Of(lambda f, x: f(f(x)), linear()),
    "an lstm of one's own": lambda: Of(lambda f, x: f(x)[0], Recurrent(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: Of(lambda f, x: f(x)[0], nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "layer norms": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Dropout(0.5), nn.LayerNorm(WIDTH, bias=False), nn.Softmax(-1), nn.Tanh()
    ),
    "attention": lambda: Of(lambda f, x: f(x, x, x)[0], nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)),
    "attention without dropout": lambda: Of(
        lambda f, x: f(x, x, x)[0], nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    ),
    "transformer layer": block,
    "transformer layer in evaluation": lambda: block().eval(),
    "checkpoint": lambda: checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: checkpointed(reentrant=True),
    "autocast": lambda: Of(autocast, nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear())),
    "own function": lambda: nn.Sequential(linear(), Raw(lambda w, x: Doubled.apply(x, w), WIDTH)),
    "own function without W": lambda: nn.Sequential(linear(), Raw(lambda w, x: Plainly.apply(x, w), WIDTH)),
    "delaying module": lambda: nn.Sequential(linear(), Delaying(), nn.ReLU(inplace=True), Delaying()),
    "delaying module twice": lambda: Of(lambda f, x: f(torch.tanh(f(x))), Delaying()),
    "delaying module, checkpointed": lambda: Of(lambda f, x: checkpoint(f, x, use_reentrant=False), Delaying()),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.ConvTranspose1d(8, 8, 3, padding=1)
    ),
    "convolution of images": lambda: nn.Sequential(
        nn.Unflatten(2, (8, 8)), nn.Conv2d(8, 8, 3, padding="same", groups=2), nn.Flatten(2)
    ),
    "product with a parameter": lambda: Raw(lambda w, x: torch.tanh(x @ w), WIDTH, WIDTH),
    "product with a transposed parameter": lambda: Raw(
        lambda w, x: functional.linear(x, w.t()) + x.matmul(w[:, :1]), WIDTH, WIDTH
    ),
    "product with a cast parameter": lambda: Raw(
        lambda w, x: functional.linear(x.bfloat16(), w.bfloat16()).float(), WIDTH, WIDTH
    ),
    "products with parts of a parameter": lambda: Raw(
        lambda w, x: functional.linear(x, w[:WIDTH]) * (x @ w[WIDTH:].t()), 2 * WIDTH, WIDTH
    ),
    "product with a computed weight": lambda: Raw(lambda w, x: x @ (w @ w) + x @ w, WIDTH, WIDTH),
    "a scale": lambda: nn.Sequential(linear(), nn.PReLU()),
    "an input transposed": lambda: Of(lambda f, x: f(x.transpose(1, 2)), nn.Linear(8, WIDTH)),
    "products of several": lambda: Raw(
        lambda w, x: torch.einsum("bsi,bij->bsj", x, w) + torch.bmm(x, w), BATCH, WIDTH, WIDTH
    ),
    "gradients that are an output's": lambda: Of(
        lambda f, g, x: f(x) + g(x), Raw(offset, BATCH, 8, WIDTH), Raw(offset, BATCH, 8, WIDTH)
    ),
    "an expanded gradient": lambda: Raw(lambda w, x: x + offset(w, x).sum() / x.numel(), BATCH, 8, WIDTH),
    "words": lambda: Of(
        lambda f, x: f(x.argmax(-1)) * x, nn.Embedding(WIDTH, WIDTH, padding_idx=3, scale_grad_by_freq=True)
    ),
    "words in place": lambda: Of(lambda f, x: torch.relu_(f(x.argmax(-1))) * x, nn.Embedding(WIDTH, WIDTH)),
    "words, renormed": lambda: Of(lambda f, x: f(x.argmax(-1)) * x, nn.Embedding(WIDTH, WIDTH, max_norm=99.0)),
    "one weight for words and output": lambda: Of(
        lambda f, x: functional.linear(f(x.argmax(-1)) * x, weight=f.weight), nn.Embedding(WIDTH, WIDTH)
    ),
    "words, sparse": lambda: Of(lambda f, x: f(x.argmax(-1)) * x, nn.Embedding(WIDTH, WIDTH, sparse=True)),
    "bags of words": lambda: Of(lambda f, x: f(x.argmax(-1)) * x.mean(1), nn.EmbeddingBag(WIDTH, WIDTH)),
    "mapped": lambda: Of(
        lambda f, x: torch.vmap(f)(x), nn.Sequential(linear(), nn.Conv1d(8, 8, 1), nn.LayerNorm(WIDTH))
    ),
    "called with parameters": lambda: Of(
        lambda f, x: torch.func.functional_call(f, dict(f.named_parameters()), x), linear()
    ),
    "products of experts": lambda: Raw(experts, 2, WIDTH, WIDTH, dtype=torch.bfloat16),
    "a gradient in a forward": lambda: Of(
        slope, nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear(), nn.Tanh())
    ),
    "bilinear": lambda: Of(lambda f, x: f(x, x), nn.Bilinear(WIDTH, WIDTH, 8)),
    "rms norm": lambda: nn.Sequential(nn.RMSNorm(WIDTH), linear()),
    "rms norm that waits": lambda: gated(nn.RMSNorm(WIDTH)),
    "rms norm as Llama's": lambda: gated(Scaled()),
    "rms norm as Gemma's": lambda: gated(Scaled(plus_one=True)),
    "exported": exported,
    "frozen": lambda: nn.Sequential(linear(), linear().requires_grad_(False), linear()),
    "adapters": Adapted,
    "complex parameters": lambda: Raw(lambda w, x: (x.to(w.dtype) @ w).abs(), WIDTH, WIDTH, dtype=torch.complex64),
    "complex layers": lambda: Of(
        lambda f, x: f(torch.complex(x, x)).real, nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
    ),
    "bfloat16": lambda: Of(
        lambda f, x: f(x.bfloat16()).float(), nn.Sequential(nn.LayerNorm(WIDTH), linear()).bfloat16()
    ),
    "state": Counting,
    **SOMETIMES,
    "state, replaced": Replacing,
    "state, averaged": Averaging,
}

# Those of their parameters whose gradient comes at B: of modules that have none for W; of norms, where they would keep
# more than F kept.
AT_B: dict[str, set[str]] = {
    "batch norm": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "spectral norm": {"0.parametrizations.weight.original", "0.bias"},
    "weight norm": {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "0.bias"},
    "an lstm of one's own": {f"layers.0.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    "lstm": {f"layers.0.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    "transformer layer in evaluation": {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"},
    "checkpoint": {f"layers.1.norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")},
    "reentrant checkpoint": {f"layers.1.norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")},
    "autocast": {"layers.0.0.weight", "layers.0.0.bias"},
    "bfloat16": {"layers.0.0.weight", "layers.0.0.bias"},
    "own function without W": {"1.weight"},
    "convolutions": {"1.weight", "1.bias"},
    "rms norm": {"0.weight"},
    "words, sparse": {"layers.0.weight"},
    "words, renormed": {"layers.0.weight"},
    "product with a computed weight": {"weight"},
    "a scale": {"1.weight"},
    "bags of words": {"layers.0.weight"},
    "mapped": {f"layers.0.{i}.{name}" for i in range(3) for name in ("weight", "bias")},
    "a gradient in a forward": {f"layers.0.{i}.weight" for i in (0, 2, 3)},  # by the derivative's own derivative
}
