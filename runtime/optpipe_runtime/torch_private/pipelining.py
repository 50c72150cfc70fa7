"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn import Parameter

from optpipe_runtime.torch_private.tensors import tree_leaves

Action = _Action  # one entry of a row
StageBase = _PipelineStageBase  # of all kinds of stages
PipelineSchedule = _PipelineSchedule  # all of torch's schedules are one
COMPUTE_LOSS = "_maybe_compute_loss"  # a schedule's method that computes the loss, if the stage is the last
FORWARD = {kind for kind in _ComputationType if kind.value in ("F", "SEND_F", "RECV_F", "WAIT_SEND_F")}
WAITS_FOR_SENDS = hasattr(_ComputationType, "WAIT_SEND_F")  # whether rows have when a message must have been sent


def stages_of_schedule(schedule: PipelineSchedule) -> list[Any]:
    """Those of this rank."""
    attributes = vars(schedule)
    return attributes.get("_stages") or [attributes["_stage"]]  # the latter of schedules for one stage a rank


def is_training(schedule: PipelineSchedule) -> bool:
    """Whether its step has backwards: `eval` is a step without."""
    return bool(schedule._has_backward)


Groups = Sequence[Mapping[str, Any]]  # of parameters, with what torch's I leaves for its W


def gradients_in(groups: Groups) -> list[Tensor]:
    """The gradients at the outputs of ops with parameters."""
    return [leaf for group in groups for leaf in tree_leaves(group.get("grads")) if isinstance(leaf, Tensor)]


def left_for_weight(stage: Any) -> dict[int, Groups]:
    """By micro-batch, what I of a stage has left for W: nothing on the first stage."""
    return {j: groups or () for j, (_, groups, *_) in stage.backward_state.items()}


def weights_behind(stage: Any, microbatch: int, loss: Tensor | None) -> set[int]:
    """By `id`, the leaves that the outputs of a forward depend on, or its loss if it is the last stage's."""
    outputs = tree_leaves(loss if stage.is_last else stage.fwd_cache[microbatch][0])
    nodes = [leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        new = {node for node, _ in nodes.pop().next_functions if node is not None} - seen
        seen |= new
        nodes += new
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def weights_split(stage: Any, microbatch: int) -> set[int]:
    """By `id`, the weights for whose gradients I has left something for W."""
    return {id(node.variable) for group in left_for_weight(stage)[microbatch] for node in group["params"]}


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Any], parameters: Sequence[Parameter]
) -> Groups:
    """torch's I of a stage without a schedule; without `gradients` of a loss. What it returns owns the graph."""
    groups: Groups = stage_backward_input([*outputs], [*gradients] or None, [*inputs], iter(parameters))[1]
    return groups


@contextmanager
def replaced(where: PipelineSchedule | StageBase, methods: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, torch finds these instead of one object's methods, or rows; then what the object had before."""
    attributes = vars(where)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)


class ScheduleRuntime(_PipelineScheduleRuntime):
    """torch's runtime for rows of actions, with actions of our own among them, and with contexts around a step that
    trains and around a loss. Its public way to such actions, `register_custom_function`, takes torch's kinds only."""

    def before_step(self, microbatches: Mapping[str, Sequence[Any] | None]) -> None:
        """Before a step or an evaluation with these micro-batches."""
        raise NotImplementedError

    def around_step(self, targets: Any) -> AbstractContextManager[object]:
        """Wraps a step that trains."""
        raise NotImplementedError

    def around_loss(self, stage: PipelineStage, microbatch: int) -> AbstractContextManager[object]:
        """Wraps what comes behind a forward, the loss where the stage is the last. It saves tensors, too."""
        raise NotImplementedError

    def set_rows(
        self, rows: Sequence[Sequence[Any]], functions: dict[Any, Callable[[Any, object], None]], order: Sequence[int]
    ) -> None:
        """The rows of all ranks. What is no `Action` in them has a `computation_type`, whose function it calls. Their
        micro-batch k is `order[k]` of the batch; torch numbers losses and outputs as the last stage computes them."""
        ours: dict[int, list[_Action | None]] = {
            rank: [action for action in row if isinstance(action, _Action)] for rank, row in enumerate(rows)
        }
        self._prepare_schedule_with_comms(ours, format="compute_comms")
        self.pipeline_order_with_comms = dict(enumerate(map(list, rows)))
        table: dict[Any, Callable[..., Any]] = self._comp_type_to_function_map
        table |= functions
        self._order = order

    def _step_microbatches(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        self.before_step({"arguments": arg_mbs, "keyword arguments": kwarg_mbs, "targets": target_mbs})
        forwards = {
            rank: [
                each for action in row for each in action.sub_actions or (action,) if each.computation_type in FORWARD
            ]
            for rank, row in self.pipeline_order_with_comms.items()
        }  # with backwards torch's evaluation raises where neighbours share a rank
        evaluation = replaced(self, {"pipeline_order_with_comms": forwards})
        if self._has_backward and self.scale_grads:
            for stage in stages_of_schedule(self):
                for parameter in stage.submod.parameters():
                    if parameter.grad is not None:  # of steps before: torch divides it at the end, too
                        parameter.grad.mul_(self._n_microbatches)
        inputs, named, targets = (each and [each[j] for j in self._order] for each in (arg_mbs, kwarg_mbs, target_mbs))
        with self.around_step(target_mbs) if self._has_backward else evaluation:
            super()._step_microbatches(inputs, named, targets, losses, *args, **more)
        for each in (losses, *(stage.output_chunks for stage in stages_of_schedule(self) if stage.is_last)):
            if each:
                each[:] = [value for _, value in sorted(zip(self._order, each, strict=True), key=lambda pair: pair[0])]

    def _maybe_compute_loss(
        self, stage: PipelineStage, output: Any, target_mbs: Any, mb_index: int, *more: Any
    ) -> None:
        """`more`: the loss's named arguments, which torch 2.11 does not have."""
        with self.around_loss(stage, mb_index):
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *more)  # type: ignore[no-untyped-call]

    def _initialize_stages(self, *args: Any, **more: Any) -> None:
        """What serves steps serves evaluations, too. torch runs a forward for it at each change between them, and up to
        2.13 buffers count that, such as BatchNorm's."""
        if self._stages_backward_initialized or (self._stages_forward_initialized and not self._has_backward):
            return
        self._stages_forward_initialized = False  # else 2.11 trains with what was made for an evaluation
        modules = [stage.submod for stage in stages_of_schedule(self)]
        before = [{name: buffer.clone() for name, buffer in module.named_buffers()} for module in modules]
        super()._initialize_stages(*args, **more)
        for module, values in zip(modules, before, strict=True):
            for name, buffer in module.named_buffers():
                buffer.copy_(values[name])
