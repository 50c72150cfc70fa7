"""Stages as users write them: gradients, buffers and the batch are those of a plain run, split or not, recomputed or
offloaded."""

import random
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
    Of,
    linear,
    runner,
)
from support.ranks.odd_stages import AT_B, ATTENTION, OTHER_KERNELS, SAVED, STAGES, USED_TWICE
from torch import Tensor, nn
from torch.nn import functional

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
    exactly &= name not in ATTENTION or "AVX512" in torch.backends.cpu.get_cpu_capability()
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
