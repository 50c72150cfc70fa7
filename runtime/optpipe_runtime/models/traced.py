"""What `torch.distributed.pipelining.pipeline` has traced and cut at `SplitPoint`s.

There a value goes straight to every stage that uses it. Here stages are a chain, so a stage hands on what later ones
need, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import Pipe
from torch.fx import Node

from optpipe_runtime.models.part import Part

Value = tuple[Node, int]  # a node, and the number of its output


def traced(pipe: Pipe) -> list[Part]:
    """The stages of a `Pipe`, in order."""
    nodes = list(pipe.split_gm.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    stages = [node for node in nodes if node.op == "call_module"]
    (output,) = (node for node in nodes if node.op == "output")
    number_of = {node: s for s, node in enumerate(stages)}
    takes = [_values(node.args) for node in stages]
    result = _values(output.args)
    used: dict[Value, int] = dict.fromkeys(result, len(stages))
    for s in reversed(range(len(stages))):
        used = dict.fromkeys(takes[s], s) | used  # the last use
    carried: list[Value] = [(node, 0) for node in placeholders]
    parts: list[Part] = []
    for s, node in enumerate(stages):
        outputs = sorted({value for value in used if value[0] is node}, key=lambda value: value[1])
        available = [*carried, *outputs]
        last = s == len(stages) - 1
        after = result if last else [value for value in available if used.get(value, -1) > s]
        sources = [_source(value, carried, node) for value in after]
        inside = [carried.index(value) for value in takes[s]]
        names = [str(value.target) for value in placeholders] if s == 0 else []
        parts.append(_Stage(pipe.get_stage_module(number_of[node]), inside, sources, names))
        carried = after
    return parts


def _values(arguments: Any) -> list[Value]:
    """The values among a node's arguments, in order; a `getitem` stands for an output of the stage before it."""
    values: list[Value] = []

    def visit(value: Any) -> None:
        if isinstance(value, Node):
            if value.op == "call_function":
                source, number = value.args
                assert isinstance(source, Node)
                assert isinstance(number, int)
                values.append((source, number))
            else:
                values.append((value, 0))
        elif isinstance(value, dict):
            for one in value.values():
                visit(one)
        elif isinstance(value, tuple | list):
            for one in value:
                visit(one)

    visit(arguments)
    return values


def _source(value: Value, carried: Sequence[Value], node: Node) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Where a stage finds a value: among what it got, or among what its module made."""
    if value[0] is node:
        return lambda _, outputs: outputs[value[1]]
    place = carried.index(value)
    return lambda inputs, _: inputs[place]


class _Stage(Part):
    """`module` gets the values of these numbers among those that come in. `names` are the inputs' names, in the first
    stage."""

    def __init__(
        self,
        module: nn.Module,
        inside: Sequence[int],
        sources: Sequence[Callable[[Sequence[Any], Sequence[Any]], Any]],
        names: Sequence[str],
    ) -> None:
        super().__init__("module.")
        self.module, self._inside, self._sources, self._names = module, inside, sources, names

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        values = [*inputs, *(kwargs[name] for name in self._names[len(inputs) :])]
        result = self.module(*(values[k] for k in self._inside))
        outputs = result if isinstance(result, tuple | list) else (result,)
        after = tuple(source(values, outputs) for source in self._sources)
        return after[0] if len(after) == 1 else after
