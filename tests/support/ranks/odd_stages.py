"""Stages as users write them, by what is odd about them, and what is known of their gradients."""

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from support.ranks.odd_modules import (
    BATCH,
    WIDTH,
    Counting,
    Delaying,
    Doubled,
    Of,
    Plainly,
    Raw,
    Recurrent,
    Scaled,
    Sometimes,
    autocast,
    block,
    checkpointed,
    experts,
    exported,
    gated,
    linear,
    offset,
    slope,
)

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
    "adapters": lambda: Of(
        lambda base, down, up, x: base(x) + up(down(x)),
        linear().requires_grad_(False),
        nn.Linear(WIDTH, 4, bias=False),
        nn.Linear(4, WIDTH, bias=False),
    ),
    "complex parameters": lambda: Raw(lambda w, x: (x.to(w.dtype) @ w).abs(), WIDTH, WIDTH, dtype=torch.complex64),
    "complex layers": lambda: Of(
        lambda f, x: f(torch.complex(x, x)).real, nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
    ),
    "bfloat16": lambda: Of(
        lambda f, x: f(x.bfloat16()).float(), nn.Sequential(nn.LayerNorm(WIDTH), linear()).bfloat16()
    ),
    "state": Counting,
    **SOMETIMES,
}

# Those of their parameters whose gradient comes at B: of modules that have none for W; of norms, where they would keep
# more than F kept.
AT_B: dict[str, set[str]] = {
    "batch norm": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "spectral norm": {"0.parametrizations.weight.original"},
    "weight norm": {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
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
    "a gradient in a forward": {f"layers.0.{i}.{name}" for i in (0, 2, 3) for name in ("weight", "bias")},
}
# Where bits may differ, by 1e-5 or 1.3e-6 of the value (what `assert_close` takes for equal): gradients of a parameter
# used twice in a stage are added one by one at W, by autograd as their sum; a forward without a graph, the first of
# two, has other kernels.
USED_TWICE = {
    "a weight twice",
    "delaying module twice",
    "product with a transposed parameter",
    "products of several",
    "products with parts of a parameter",
    "product with a computed weight",
    "one weight for words and output",
    "an input transposed",
    "a gradient in a forward",
}
# Without AVX-512 their outputs differ from those of a plain run by 8e-6 at most.
ATTENTION = {
    *("attention", "attention without dropout", "transformer layer", "transformer layer in evaluation"),
    *("checkpoint", "reentrant checkpoint"),
}
OTHER_KERNELS = {"lstm", "an lstm of one's own", "transformer layer in evaluation"}
