"""A split backward of whole stages: what waits for W, in what order, and what does not wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ranks import split as rank_split
from support.ranks.odd_stages import AT_B, BATCH, WIDTH, Delaying, Of, linear, slope
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn import functional

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.learn import learn
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import modules, register_split

CPU = torch.device("cpu")
BYTES = BATCH * 8 * WIDTH * 4  # of what passes between two stages


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link(CPU, False)
    yield link
    link.close()


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, 8, WIDTH) for _ in range(count)]


def runner(module: nn.Module, link: Link) -> StageRunner:
    stage = StageRunner(0, module, CPU, link, HostPool(CPU))
    learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))
    stage.start_step((), 1)
    return stage


def run(stage: StageRunner, program: str, inputs: list[Tensor]) -> dict[int, Tensor]:
    """Ops as in "F0 B0 W0", with gradients of one; returns input gradients."""
    found: dict[int, Tensor] = {}
    for op in program.split():
        kind, j = op[:-1], int(op[-1])
        if kind == "F":
            stage.forward(j, (inputs[j].clone(),))
        elif kind == "C":
            stage.forward(j, (inputs[j].clone(),), recompute=True)
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


def test_a_class_without_the_method_can_be_registered(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Delaying):
        need_backward_dw = None  # type: ignore[assignment]

    monkeypatch.setattr(modules, "_registered", ())
    register_split(Silent)
    module = nn.Sequential(linear(), Silent())
    plain = copy.deepcopy(module)
    plain[1].delays = False
    require_as_plain(module, plain, batches(1), run(runner(module, link), "F0 B0 W0", batches(1)))


def test_a_delaying_module_outside_a_pipeline_is_left_alone(link: Link) -> None:
    module = Delaying()
    run(runner(module, link), "F0 BW0", batches(1))
    torch.autograd.backward(module(batches(1)[0].requires_grad_()), torch.ones(BATCH, 8, WIDTH))
    assert len(module.pending) == 1
    assert not module._forward_hooks


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a part"])
def test_a_compiled_module_stays_one_graph(whole: bool, link: Link) -> None:
    """Its gradients come at B, all of them, and it is not compiled anew for every micro-batch."""
    graphs: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    inner = nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU(), linear())
    compiled = torch.compile(copy.deepcopy(inner), backend=backend)
    before = nn.Identity() if whole else linear()
    plain, module = nn.Sequential(before, inner), nn.Sequential(copy.deepcopy(before), compiled)
    stage = runner(module, link)
    run(stage, "F0 BW0 C0 BW0", batches(1))
    stage.module.zero_grad()
    made = len(graphs)
    require_as_plain(
        module, plain, batches(6), run(stage, "F0 F1 F2 B1 B0 W1 W0 BW2 C3 O3 F4 O4 B4 B3 W3 W4 F5 BW5", batches(6))
    )
    assert len(graphs) == made
    assert all(len(graph) == 4 for graph in graphs), graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a part"])
def test_a_compiled_graph_leaves_nothing_to_w(whole: bool, link: Link) -> None:
    torch._dynamo.reset()
    inner = nn.Sequential(linear(), nn.GELU(), linear())
    compiled = torch.compile(copy.deepcopy(inner), backend="aot_eager")
    before = nn.Identity() if whole else linear()
    plain, module = nn.Sequential(before, inner), nn.Sequential(copy.deepcopy(before), compiled)
    stage = runner(module, link)
    found = run(stage, "F0 F1 O1 C2 B0 B1 W0 W1 B2", batches(3))
    assert stage.at_b == {name for name, _ in module.named_parameters() if name.startswith("1.")}
    assert stage.held_bytes(2) == (0 if whole else 2 * BYTES)
    stage.weight(2)
    require_as_plain(module, plain, batches(3), found)


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
    assert stage.at_b == {"weight", "bias"}


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
    assert stage.at_b == (set() if dropout else {"0.weight", "0.bias"})


def test_autocast_around_a_step_applies_to_its_forwards_only(link: Link) -> None:
    """The backward of a float32 layer inside stays one of float32."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).float()
            with torch.autocast("cpu", enabled=False):
                result: Tensor = self.outer(y)
            return result

    module = Inside()
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


def test_a_derivative_through_a_split_graph_is_refused(link: Link) -> None:
    """Its second half would be lost, and nobody would know."""
    stage = StageRunner(0, Of(slope, nn.Sequential(nn.Conv1d(8, 8, 1), nn.Tanh())), CPU, link, HostPool(CPU))
    with pytest.raises(InputError, match=r"^a gradient is to be differentiated again, through conv1d"):
        learn(stage, (torch.zeros(BATCH, 8, WIDTH, requires_grad=True),))


class Block(nn.Module):
    """A transformer's, with attention that keeps no probabilities."""

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


def held(stage: StageRunner) -> tuple[int, int]:
    """Bytes after F and after B."""
    run(stage, "F0", batches(1))
    after_f = stage.held_bytes(0)
    stage.backward(0, (torch.ones(BATCH, 8, WIDTH),), split=True)
    return after_f, stage.held_bytes(0)


def test_an_upper_bound_of_what_norms_would_hold(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    _, without = held(runner(Block(), link))
    monkeypatch.setattr("optpipe_runtime.stage.learn.would_hold", lambda _: 0)
    stage = runner(Block(), link)
    _, with_them = held(stage)
    assert stage.at_b == set()
    assert with_them == pytest.approx(1.25 * without, rel=0.01)


def test_convolutions_free_what_lies_between_them(link: Link) -> None:
    layers = [
        layer for _ in range(3) for layer in (nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    ]
    after_f, after_b = held(runner(nn.Sequential(*layers), link))
    assert after_b == 6 * BYTES
    assert after_b == pytest.approx(0.86 * after_f, rel=0.01)


def test_odd_stages_in_a_pipeline(ranks: Ranks) -> None:
    """Profiled, which leaves nothing behind, then with Bs, Ws and BWs in any order, then offloaded."""
    names = [
        "delaying module",
        "delaying module twice",
        "convolutions",
        "own function",
        "attention without dropout",
        "a gradient in a forward",
    ]
    programs = [
        ["0F0", "0F1", "0F2", "0B0", "0BW1", "0B2", "0W2", "0W0"],
        ["1F0", "1B0", "1F1", "1BW1", "1F2", "1B2", "1W2", "1W0"],
    ]
    for rank, found in enumerate(ranks(rank_split.trained, names=names, microbatches=3, programs=programs)):
        for name, result in zip(names, found, strict=True):
            assert result.difference < 1e-6, (rank, name)
            assert result.at_b == AT_B.get(name, set()), (rank, name)


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
    stage.norms_wait = True
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
