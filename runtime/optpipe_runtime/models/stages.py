"""`stages_of`: the stages of a model that are on this rank. `traced`: those that torch has cut at `SplitPoint`s."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe
from torch.fx import Node
from torch.fx.node import map_arg

from optpipe.errors import InputError
from optpipe.model.placement import Placement
from optpipe.schedule import Schedule
from optpipe_runtime.models.model import CausalLM, Layers, Model, Part
from optpipe_runtime.torch_private.pipelining import StageBase
from optpipe_runtime.torch_private.tensors import compiled_call, is_compiled, is_wrapped


def stages_of(
    model: Any, placement: Sequence[int] | Schedule, layers: Sequence[int] | None = None, rank: int | None = None
) -> dict[int, nn.Module]:
    """Cuts a model into the stages of a `Pipeline`, and returns those of this rank, by number. The stages share the
    model's parameters.

    A parameter that stages on several ranks use, such as an embedding that is the head, too, is tied by the `Pipeline`.
    A language model is compared with its stages on a small run (`models.proof`). Raises `InputError` if the model is of
    another kind, cannot be cut so, or is not what its stages are in a row.

    Parameters
    ----------
    model
        The same on every rank, of these kinds:

        - a list of layers, or an nn.Sequential: each layer takes what the one before returns;
        - a causal language model of transformers, such as LlamaForCausalLM: the first stage takes `input_ids`, the last
          one returns logits, and each takes further arguments of the model's forward by name;
        - a `Pipe`, which torch.distributed.pipelining.pipeline has cut at `SplitPoint`s;
        - torch's `PipelineStage`s of this rank, in a list.
    placement
        The rank of each stage, as for `Pipeline`. Or a schedule for a problem of `profile_layers`: its stages.
    layers
        How many layers each stage gets; of a language model, embedding and head are one each. None: about equally
        many.
    rank
        The number of this rank in `placement`. None: that of torch.distributed.
    """
    if isinstance(placement, Schedule):
        layers, placement = _as_found(placement, layers)
    rank = dist.get_rank() if rank is None else rank
    if isinstance(model, list | tuple) and model and all(isinstance(part, StageBase) for part in model):
        _require_none(layers, "torch's PipelineStages")
        return {stage.stage_index: stage.submod for stage in model}
    if isinstance(model, Pipe):
        _require_none(layers, "a Pipe")
        if model.num_stages != len(placement):
            raise InputError(f"placement has {len(placement)} stages: the Pipe was cut into {model.num_stages}")
        parts = traced(model)
    else:
        whole = model_of(model)
        counts = _counts(whole, placement, layers)
        whole.require_equal(counts)
        parts = [whole.part(a, b) for a, b in pairwise((0, *accumulate(counts)))]
    _note_names(parts, placement)
    return {s: parts[s] for s, owner in enumerate(placement) if owner == rank}


def model_of(model: Any) -> Model:
    """Raises `InputError` if there is no way to cut it."""
    if isinstance(model, nn.Sequential | nn.ModuleList):
        if type(model).forward not in (nn.Sequential.forward, nn.ModuleList.forward) or is_wrapped(model):
            raise InputError(
                f"model is a {type(model).__name__}: its own forward or hooks are lost where its layers are cut; "
                "give a list of its layers if they do nothing else"
            )
        named = model.named_modules(remove_duplicate=False)  # a layer may stand in several places
        return Layers((name, layer) for name, layer in named if name and "." not in name)
    if isinstance(model, list | tuple) and model and all(isinstance(layer, nn.Module) for layer in model):
        return Layers((str(i), layer) for i, layer in enumerate(model))
    if isinstance(model, nn.Module) and is_compiled(model) and compiled_call(model) is None:
        raise InputError("model is compiled as a whole, and cannot be cut: give the model itself, with compiled layers")
    if isinstance(model, nn.Module):
        return CausalLM(model)
    raise InputError(
        f"model is a {type(model).__name__}: must be a list of layers, an nn.Sequential, a causal language model of "
        "transformers, a Pipe, or a list of PipelineStages"
    )


def _counts(model: Model, placement: Sequence[int], layers: Sequence[int] | None) -> list[int]:
    stages = len(placement)
    if stages > model.layers:
        raise InputError(f"placement has {stages} stages: the model has {model.layers} layers")
    if layers is None:
        return model.even(stages)
    if len(layers) != stages:
        raise InputError(f"layers has {len(layers)} entries: placement has {stages} stages, one entry each")
    if min(layers) < 1 or sum(layers) != model.layers:
        raise InputError(
            f"layers = {list(layers)}: must be at least 1 each, and {model.layers} together, as the model has"
        )
    return list(layers)


def _as_found(schedule: Schedule, layers: Sequence[int] | None) -> tuple[Sequence[int] | None, list[int]]:
    """The layers of each stage, and their ranks, of a schedule whose problem has layers."""
    problem = schedule.problem
    if len(problem.all_routes) > 1:
        raise InputError(f"placement is a schedule for {len(problem.all_routes)} routes: make its stages by hand")
    if layers is None and problem.layers is not None:
        as_placed = schedule.placement or Placement.balanced(problem, 1)
        if as_placed.apply(problem).stages != problem.stages:
            raise InputError("placement is a schedule whose stages are not those of its problem's layers: give layers")
        layers = as_placed.layers
    return layers, [stage.device for stage in problem.stages]


def _require_none(layers: Sequence[int] | None, what: str) -> None:
    if layers is not None:
        raise InputError(f"layers = {list(layers)}: {what} cannot be cut in another way")


def _note_names(parts: Sequence[Part], placement: Sequence[int]) -> None:
    """Notes in each part the names of its parameters in the whole model, and which of them are on other ranks, too."""
    uses: dict[nn.Parameter, list[tuple[int, str]]] = defaultdict(list)
    for s, part in enumerate(parts):
        for name, parameter in part.named_parameters(remove_duplicate=False):
            uses[parameter].append((s, name))
    for places in uses.values():
        first, name = places[0]
        whole = name.removeprefix(parts[first].prefix)
        for s, own_name in places:
            parts[s].whole_names[own_name] = whole
            if len({placement[k] for k, _ in places}) > 1:
                parts[s].shared[whole] = own_name


# What torch has cut

Value = tuple[Node, int]  # a node, and the number of its output


def traced(pipe: Pipe) -> list[Part]:
    """The stages of a `Pipe`, in order."""
    nodes = list(pipe.split_gm.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    stages = [node for node in nodes if node.op == "call_module"]
    (output,) = (node for node in nodes if node.op == "output")
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
        handed_on = [len(carried) + v[1] if v[0] is node else carried.index(v) for v in after]
        inside = [carried.index(value) for value in takes[s]]
        names = [str(value.target) for value in placeholders] if s == 0 else []
        parts.append(_Stage(pipe.get_stage_module(s), inside, handed_on, names))
        carried = after
    return parts


def _values(arguments: Any) -> list[Value]:
    """The values among a node's arguments, in order; a `getitem` stands for an output of the stage before it."""
    values: list[Any] = []

    def visit(node: Node) -> Node:
        values.append(node.args if node.op == "call_function" else (node, 0))
        return node

    map_arg(arguments, visit)
    return values


class _Stage(Part):
    """`module` gets the values of the numbers `inside` among those that come in. Of these, its outputs behind them, the
    values of the numbers `after` go on. `names` are the inputs' names, in the first stage."""

    def __init__(self, module: nn.Module, inside: Sequence[int], after: Sequence[int], names: Sequence[str]) -> None:
        super().__init__("module.")
        self.module, self._inside, self._after, self._names = module, inside, after, names

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        values = [*inputs, *(kwargs[name] for name in self._names[len(inputs) :])]
        result = self.module(*(values[k] for k in self._inside))
        values += result if isinstance(result, tuple | list) else (result,)
        after = tuple(values[k] for k in self._after)
        return after[0] if len(after) == 1 else after
