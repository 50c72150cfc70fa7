"""A split backward of whole stages, also compiled ones: what waits for W, in what order, and what does not wait."""

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
    Block,
    Delaying,
    Of,
    batches,
    linear,
    require_as_plain,
    run,
    runner,
)
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime.memory.link import Link

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


# Compiled


def counting(graphs: list[set[str]]) -> Callable[..., Any]:
    """A backend that notes the functions of each region."""
    from torch._dynamo.backends.debugging import aot_eager  # it loads what takes a second, also where no test runs

    def backend(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        graphs.append({getattr(n.target, "__name__", "") for n in graph.graph.nodes if n.op == "call_function"})
        return aot_eager(graph, example)

    return backend


class Mlp(nn.Module):
    """Of nn.Sequential nothing would be compiled once a region in it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = linear(), nn.LayerNorm(WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.norm(self.up(x))))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a part"])
@pytest.mark.parametrize("fullgraph", [True, False], ids=["full graph", "regions"])
def test_a_compiled_module(whole: bool, fullgraph: bool, link: Link) -> None:
    """Regions end at its linear layers, whose gradients come at W, but for a full graph, whose gradients come at B, all
    of them. Nothing is compiled anew for another micro-batch."""
    graphs: list[set[str]] = []
    torch._dynamo.reset()
    inner = Mlp()
    compiled = copy.deepcopy(inner)
    compiled.compile(backend=counting(graphs), fullgraph=fullgraph)
    before = nn.Identity() if whole else linear()
    plain, module = nn.Sequential(before, inner), nn.Sequential(copy.deepcopy(before), compiled)
    stage = runner(module, link)
    made = len(graphs)
    assert {"linear", "layer_norm", "gelu"} in graphs, "that of a plain run, for BW"
    run(stage, "F0 BW0 C0 B0 W0", batches(1))
    made = len(graphs)
    assert (stage.split.whole, {"layer_norm", "gelu"} in graphs) == (fullgraph, not fullgraph)
    assert stage.split.at_b == {
        f"1.{name}" for name, _ in inner.named_parameters() if fullgraph or name.startswith("norm")
    }
    stage.module.zero_grad()
    program = "F0 F1 F2 B1 B0 W1 W0 BW2 C3 O3 F4 O4 B4 B3 W3 W4 F5 BW5 K6 B6 W6 K7 BW7"
    require_as_plain(module, plain, batches(8), run(stage, program, batches(8)))
    assert len(graphs) == made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_compiled_layers(link: Link) -> None:
    """To the bit as the same compiled layers in a plain run; only gradients of norms come at B."""
    torch._dynamo.reset()
    module = nn.Sequential(Block(), Block())
    plain = copy.deepcopy(module)
    for layer in (*module, *plain):
        layer.compile(backend="aot_eager")
    stage, (x, *_) = runner(module, link), batches(1)
    (y,) = stage.forward(0, (x.clone(),))
    run(stage, "B0 W0", [x])
    module.zero_grad()
    assert torch.equal(y, plain(x))
    found = run(stage, "F0 F1 B1 B0 W1 W0 F2 BW2 C3 B3 W3 K4 B4 W4", batches(5))
    require_as_plain(module, plain, batches(5), found)
    assert stage.split.at_b == {name for name, _ in module.named_parameters() if ".norm" in name}
