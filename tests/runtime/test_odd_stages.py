"""Stages as users write them: gradients, buffers and the batch are those of a plain run, split or not, recomputed or
offloaded."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from support.ranks.device import ON_CUDA, close, device
from support.ranks.odd_modules import (
    BATCH,
    CPU,
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
    runner,
    slope,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.execute.batch import cut
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import FULL, Level, as_levels
from optpipe_runtime.stage.runner import StageRunner, learn

LEVELS = as_levels(["full", "cheap"]) | {"everything": Level.by_policy("everything", lambda op: True)}


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link(device(), False)
    yield link
    link.close()


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
OTHER_KERNELS = {"lstm", "an lstm of one's own", "transformer layer in evaluation"}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def require_same(ours: Tensor, theirs: Tensor | None, exactly: bool) -> None:
    assert theirs is not None
    if ON_CUDA:
        close(ours.to_dense(), theirs.to_dense())
    elif exactly:
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    else:
        torch.testing.assert_close(ours, theirs.detach())


def tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def state(module: nn.Module) -> list[Tensor]:
    return [*(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]


class Way(NamedTuple):
    """How a stage runs. `told`: F is told which backward will come, as in a step."""

    keeping: Literal["kept", "offloaded", "full", "cheap", "everything"]
    split: bool
    told: bool


WAYS = [
    Way(*chosen)
    for chosen in product(("kept", "offloaded", "full", "cheap", "everything"), (True, False), (True, False))
]


def in_pairs(way: Way) -> bool:
    """Any two of the three choices together; the others are left to `make soak`."""
    alike = way.keeping not in ("offloaded", "everything")
    return (way.split == way.told) == alike and way != Way("cheap", split=False, told=False)


@pytest.mark.filterwarnings("ignore:`isinstance")  # of a copy of what torch.export writes
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # a reentrant checkpoint's, of the F that is recomputed
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if in_pairs(way) else pytest.mark.soak) for way in WAYS],
    ids=lambda way: f"{way.keeping}-{'split' if way.split else 'fused'}{'-told' if way.told else ''}",
)
def test_odd_stages_train_as_in_a_plain_run(way: Way, link: Link) -> None:
    failures = []
    for name in (*STAGES, *(SAVED if way.keeping in LEVELS else ())):
        if name == "a gradient in a forward" and LEVELS.get(way.keeping, FULL).keeps is not None:
            continue  # refused, below
        try:
            require_as_plain(name, way, link)
        except Exception as error:
            error.add_note(f"stage: {name}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(STAGES)} stages", failures)


def require_as_plain(name: str, way: Way, link: Link) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(BATCH, 8, WIDTH).to(device()) for _ in range(2)]
    modules = []
    for _ in range(2):
        torch.manual_seed(2)
        modules.append((STAGES | SAVED)[name]().to(device()))
    plain, module = modules
    for part in plain.modules():
        part.delays = False

    seed(3)
    expected, dxs = [], []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        outputs = tensors(plain(leaf.clone()))
        wanted = [y for y in outputs if y.requires_grad]
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])
        expected.append(outputs)
        dxs.append(leaf.grad)

    exactly = name not in USED_TWICE and (name not in OTHER_KERNELS or way.keeping != "full")
    stage = StageRunner(0, module, device(), link, HostPool(device()))
    learn(stage, (torch.zeros(BATCH, 8, WIDTH, device=device(), requires_grad=True),))
    stage.start_step((), 1)
    seed(3)
    for j, x in enumerate(inputs):
        outputs = stage.forward(
            j,
            (x.clone(),),
            recompute=LEVELS.get(way.keeping),
            backward=(Kind.B if way.split else Kind.BW) if way.told else None,
            captured=way.keeping == "offloaded" or not way.told,
        )
        for ours, theirs in zip(outputs, expected[j], strict=True):
            require_same(ours, theirs, exactly)
        if way.keeping == "offloaded":
            stage.offload(j, 0)
            stage.drop(j, 0)
    for j, dx in enumerate(dxs):
        if way.keeping in LEVELS:
            stage.recompute(j)
        elif way.keeping == "offloaded":
            stage.reload(j, 0)
        gradients = tuple(
            torch.ones(spec.shape, dtype=spec.dtype, device=device()) for spec in stage.io[0].output_gradients
        )
        require_same(stage.backward(j, gradients, way.split)[0], dx, exactly)
        if way.split:
            assert ON_CUDA or stage.split.at_b == AT_B.get(name, set()), "norms wait where other kernels save as much"
            stage.weight(j)
    assert stage.idle
    assert len(state(module)) == len(state(plain))
    for ours, theirs in zip(state(module), state(plain), strict=True):
        require_same(ours, theirs, exactly)


@pytest.mark.parametrize("recompute", [*LEVELS.values(), None])
def test_a_batch_that_is_changed_in_place_is_changed_once(recompute: Level | None, link: Link) -> None:
    """As in a plain run: not by learning the shapes, and once by F and C together, as targets are by the loss."""
    module = STAGES["adds in place at entry"]()
    stage = StageRunner(0, module, CPU, link, HostPool(CPU), lambda y, target: functional.mse_loss(y, target.add_(1)))
    batch = torch.zeros(2, 2 * BATCH, 8, WIDTH)
    inputs, targets = (cut(part, 2, "inputs") for part in batch)
    learn(stage, inputs[0], targets[0])
    assert torch.equal(batch, torch.zeros_like(batch))
    stage.start_step((batch,), 1)
    for j in range(2):
        stage.forward(j, inputs[j], targets[j], recompute=recompute)
    for j in range(2):
        if recompute:
            stage.recompute(j)
        stage.backward(j, (), split=False)
    assert torch.equal(batch, torch.ones_like(batch))


@pytest.mark.parametrize("recompute", [*LEVELS.values(), None])
def test_outputs_do_not_share_memory_with_the_batch(recompute: Level | None, link: Link) -> None:
    x = torch.zeros(4 * BATCH, 8, WIDTH)[:BATCH]
    stage = runner(nn.Identity(), link, x)
    (y,) = stage.forward(0, (x,), recompute=recompute)
    assert y.untyped_storage().nbytes() == x.nbytes, "the next stage would hold, and move, the whole batch"


def test_a_gradient_in_a_forward_is_recomputed_in_full_only(link: Link) -> None:
    stage = runner(STAGES["a gradient in a forward"](), link)
    with pytest.raises(InputError, match=r"^stage 0 takes a gradient in its forward: only level 'full' recomputes"):
        stage.forward(0, (torch.zeros(BATCH, 8, WIDTH),), recompute=LEVELS["cheap"])


@pytest.mark.parametrize(
    "loss", [lambda y: torch.tensor(1.0), lambda y: functional.mse_loss(y, y).detach(), lambda y: y.sum().item()]
)
def test_a_loss_without_a_gradient_is_refused_and_changes_nothing(loss: Callable[[Tensor], Any], link: Link) -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), linear())
    with pytest.raises(InputError, match=r"^(the loss requires no gradient|loss_fn must return a tensor)"):
        runner(module, link, torch.ones(BATCH, 8, WIDTH), loss=loss)
    assert module[0].num_batches_tracked == 0
    assert torch.equal(module[0].running_mean, torch.zeros(8))  # type: ignore[arg-type]


def test_a_batch_that_requires_a_gradient_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^inputs requires a gradient, and a step computes those of parameters only: detach it"
    ):
        cut((torch.zeros(2, 4), torch.zeros(2, 4, requires_grad=True)), 2, "inputs")


def test_parameters_may_be_frozen_later_but_not_unfrozen(link: Link) -> None:
    module, x, ones = linear(), torch.zeros(BATCH, 8, WIDTH), torch.ones(BATCH, 8, WIDTH)
    stage = runner(module, link, x)
    module.requires_grad_(False)
    stage.forward(0, (x,))
    stage.backward(0, (ones,), split=False)
    assert module.weight.grad is None
    learn(stage, (x,))
    module.requires_grad_(True)
    with pytest.raises(InputError, match=r"^stage 0 needs a gradient that it did not need at the start"):
        stage.forward(0, (x,))


def test_a_gradient_that_no_stage_waits_for_is_an_error(link: Link) -> None:
    """An input that the stage did not use when it was learned, and uses now."""
    uses = False
    x, y = (torch.zeros(BATCH, WIDTH, requires_grad=True) for _ in range(2))
    stage = runner(Of(lambda f, x, y: f(x) + y if uses else f(x), linear()), link, x, y)
    assert stage.io[0].asked == (0,)
    uses = True
    stage.forward(0, (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))
    with pytest.raises(InputError, match=r"^stage 0 has a gradient for its input 1, which had none at the start"):
        stage.backward(0, (torch.ones(BATCH, WIDTH),), split=False)
