"""Split backwards under autocast, and of compiled stages: each weight is cast once a step, for all micro-batches and
their ops; regions end where a weight gradient waits for W."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import (
    WIDTH,
    Block,
    batches,
    linear,
    require_as_plain,
    run,
    runner,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe_runtime.memory.link import Link
from optpipe_runtime.stage.levels import FULL, LEVELS, Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split.ops import Casts

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
    with autocast():
        return runner(module, link)


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
