"""Weight gradients that wait for W: what they hold, where plain autograd runs in their place, and what is an error.
That they have the bits of plain autograd, and that norms that are written out train as in a plain run, is in
`test_odd_stages`. Under autocast around a step each weight is cast once a step, for all micro-batches and their ops."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import BATCH, CPU, WIDTH, Of, Scaled, batches, gated, linear, runner
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import FULL, LEVELS, Level
from optpipe_runtime.stage.runner import StageRunner, learn
from optpipe_runtime.stage.split import WeightQueue
from optpipe_runtime.stage.split.backward import Splitting
from optpipe_runtime.stage.split.ops import Casts


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


# Autocast


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


def stage_of(module: nn.Module, link: Link) -> StageRunner:
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    with autocast():
        learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))
    stage.start_step((), 1)
    return stage


def step(stage: StageRunner, recompute: Level | None, split: bool) -> int:
    """All forwards, then all backwards; returns the number of casts."""
    with autocast(), Counting() as counting:
        outputs = [stage.forward(j, (x,), recompute=recompute)[0] for j, x in enumerate(batches(M))]
        for j, y in enumerate(outputs):
            if recompute:
                stage.recompute(j)
            stage.backward(j, (torch.ones_like(y),), split)
            if split:
                stage.weight(j)
        return counting.casts


def plainly(module: nn.Module) -> list[Tensor]:
    with autocast():
        outputs = [module(x) for x in batches(M)]
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
