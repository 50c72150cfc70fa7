"""Weight gradients that wait for W: what they hold, where plain autograd runs in their place, what is an error; and in
whole stages: what waits, in what order, and what does not. That they have the bits of plain autograd, and that norms
that are written out train as in a plain run, is in `test_odd_stages`."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import (
    BATCH,
    CPU,
    WIDTH,
    Delaying,
    Of,
    Scaled,
    batches,
    gated,
    linear,
    require_as_plain,
    run,
    runner,
)
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.split import WeightQueue
from optpipe_runtime.stage.split.backward import Splitting


def left_to_w(module: nn.Module, x: Tensor, norms: bool = True, deferring: bool = True) -> WeightQueue:
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
    queue = left_to_w(module, x.requires_grad_())
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
    queue = left_to_w(module, x)
    assert module.weight.grad is None
    assert sum(queue.held().values()) == 4 * (2 * 120 + 2 * (120 // torch.zeros(shape).numel())), (
        "input, gradient, mean and deviation"
    )
    assert not left_to_w(module, x, norms=False).held()
    assert module.weight.grad is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6))
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    queue = left_to_w(module, torch.nested.nested_tensor(parts, layout=layout).requires_grad_())
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


# Whole stages

BYTES = BATCH * 8 * WIDTH * 4  # of what passes between two stages


@pytest.mark.parametrize(
    "program", ["F0 F1 B0 B1 W1 W0", "F0 F1 F2 B0 BW1 B2 W2 W0", "F0 O0 C1 B0 B1 W1 W0", "F0 F1 BW1 BW0"]
)
def test_a_module_with_its_own_queue_works_in_any_order(program: str, link: Link) -> None:
    """W1 takes what B0 left, since that is the oldest: all is done in the end, and each time as many bytes go."""
    module = nn.Sequential(linear(), Delaying())
    plain = copy.deepcopy(module)
    plain[1].delays = False
    inputs = batches(1 + max(int(op[-1]) for op in program.split()))
    stage = runner(module, link)
    require_as_plain(module, plain, inputs, run(stage, program, inputs))
    assert stage.idle
    assert not module[1].pending


def test_tensors_in_a_modules_own_queue_are_counted(link: Link) -> None:
    module = nn.Sequential(nn.Tanh(), Delaying())
    stage = runner(module, link)
    run(stage, "F0 F1 B0 B1", batches(2))
    assert [stage.held_bytes(j) for j in range(2)] == [2 * BYTES, 2 * BYTES], "input and output gradient"
    stage.weight(1)
    assert stage.held_bytes(1) == 0, "it has let as many bytes go as it held"
    assert len(module[1].pending) == 1
    stage.weight(0)
    assert not module[1].pending


def test_a_step_that_is_given_up_leaves_nothing_in_the_queue(link: Link) -> None:
    module = nn.Sequential(linear(), Delaying())
    plain = copy.deepcopy(module)
    plain[1].delays = False
    stage = runner(module, link)
    run(stage, "F0 F1 F2 B0 B1 W1", batches(3))
    stage.abandon()
    assert not module[1].pending
    module.zero_grad()
    require_as_plain(module, plain, batches(2), run(stage, "F0 F1 B0 B1 W1 W0", batches(2)))


def test_a_delaying_module_outside_a_pipeline_is_left_alone(link: Link) -> None:
    module = Delaying()
    run(runner(module, link), "F0 BW0", batches(1))
    torch.autograd.backward(module(batches(1)[0].requires_grad_()), torch.ones(BATCH, 8, WIDTH))
    assert len(module.pending) == 1
    assert not module._forward_hooks


def test_hooks_of_a_parameter_are_called_once_with_its_gradient(link: Link) -> None:
    """So it does not wait: for B they would have none."""
    module, seen = linear(), []
    module.weight.register_hook(lambda grad: grad * 2)
    module.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone()))  # type: ignore[union-attr]
    plain = copy.deepcopy(module)
    plain.weight.register_hook(lambda grad: grad * 2)
    stage = runner(module, link)
    require_as_plain(module, plain, batches(1), run(stage, "F0 B0 W0", batches(1)))
    assert len(seen) == 1
    assert stage.split.at_b == {"weight", "bias"}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_norms_wait_for_w_if_b_still_frees_memory(dropout: float, link: Link) -> None:
    """A linear layer keeps input and output gradient until W; with as much for the norm it is more than F kept, but for
    a mask."""
    module = nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Dropout(dropout), nn.Softmax(-1)) * 2, linear())
    stage = runner(module, link)
    run(stage, "F0", batches(1))
    kept = stage.held_bytes(0)
    stage.backward(0, (torch.ones(BATCH, 8, WIDTH),), split=True)
    assert stage.held_bytes(0) <= kept
    assert stage.split.at_b == (set() if dropout else {"0.weight", "0.bias"})


def test_autocast_around_a_step_applies_to_its_forwards_only(link: Link) -> None:
    """The backward of a float32 layer inside stays one of float32."""

    def inside(inner: nn.Module, outer: nn.Module, x: Tensor) -> Tensor:
        y = inner(x).float()
        with torch.autocast("cpu", enabled=False):
            result: Tensor = outer(y)
        return result

    module = Of(inside, linear(), linear())
    plain = copy.deepcopy(module)
    (x,) = batches(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage = runner(module, link)
        (dx,) = run(stage, "F0 B0 W0", [x]).values()
        leaf = x.clone().requires_grad_()
        y = plain(leaf)
    torch.autograd.backward(y, torch.ones_like(y))
    assert torch.equal(dx, leaf.grad)  # type: ignore[arg-type]
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class InBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.bfloat16()).float()  # type: ignore[no-any-return]


def buffered(parameter: Any) -> Any:
    """Gives a parameter a gradient buffer, and the hook that Megatron gives it; what keeps the hook."""

    def add(*_: Any) -> None:
        if parameter.grad is not None:  # else it waits for W
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

    parameter.main_grad = torch.zeros(parameter.shape)
    summing = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    summing.register_hook(add)
    return summing


def test_each_w_adds_to_the_gradient_buffer_that_a_parameter_has(link: Link) -> None:
    """As a hook does at B, here for the norm: micro-batches are summed in the buffer's type, and `.grad` stays free."""
    inputs, module = batches(4), InBfloat16()
    plain = copy.deepcopy(module)
    expected = [torch.zeros(p.shape) for p in plain.parameters()]
    for x in inputs:
        plain.zero_grad()
        plain(x).backward(torch.ones_like(x))
        for total, parameter in zip(expected, plain.parameters(), strict=True):
            total += parameter.grad
    assert not torch.equal(expected[0].bfloat16().float(), expected[0]), "which a sum in bfloat16 could not be"
    _hooks = [buffered(parameter) for parameter in module.parameters()]
    stage = runner(module, link)
    run(stage, "F0 F1 B0 F2 W0 B1 B2 W1 F3 W2 B3 W3", inputs)
    for total, parameter in zip(expected, module.parameters(), strict=True):
        assert torch.equal(parameter.main_grad, total)  # type: ignore[attr-defined]
        assert parameter.grad is None
    assert stage.split.at_b == {"layers.1.weight", "layers.1.bias"}


def test_pipelines_in_two_threads_have_their_own_weight_gradients() -> None:
    """While one is in a B, another's BW leaves it nothing."""
    both, orders = threading.Barrier(2), {"B": "F0 B0 W0", "BW": "F0 BW0"}
    found: dict[str, bool] = {}

    def train(kind: str) -> None:
        own = Link(CPU, False)
        module = nn.Sequential(*(linear() for _ in range(8)))
        plain = copy.deepcopy(module)
        stage = runner(module, own)
        x = batches(1)
        both.wait(120)
        for _ in range(100):
            module.zero_grad()
            run(stage, orders[kind], x)
            plain.zero_grad()
            torch.autograd.backward(plain(x[0]), torch.ones_like(x[0]))
            grads = [(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True)]
            found[kind] = found.get(kind, True) and all(p is not None and torch.allclose(p, q) for p, q in grads)  # type: ignore[arg-type]
        own.close()

    threads = [threading.Thread(target=train, args=(kind,)) for kind in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"B": True, "BW": True}


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
