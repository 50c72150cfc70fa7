"""A split backward of compiled stages: what is compiled, and what does not wait for W."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks.odd_modules import WIDTH, linear
from support.ranks.split_stages import Block, batches, require_as_plain, run, runner
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime.memory.link import Link


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
    """Outputs and input gradients are to the bit those of the same compiled layers in a plain run, and only gradients
    of norms come at B."""
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
