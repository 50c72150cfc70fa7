"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Any], parameters: Sequence[Parameter]
) -> Groups:
    """torch's I of a stage without a schedule; without `gradients` of a loss. What it returns owns the graph."""
    groups: Groups = stage_backward_input([*outputs], [*gradients] or None, [*inputs], iter(parameters))[1]
    return groups


@contextmanager
def replaced(where: PipelineSchedule | StageBase, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While it is open, torch calls these instead of the methods of one object; then what the object had before."""
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

    def set_rows(self, rows: Sequence[Sequence[Any]], functions: dict[Any, Callable[[Any, object], None]]) -> None:
        """The rows of all ranks. What is no `Action` in them has a `computation_type`, whose function it calls."""
        ours: dict[int, list[_Action | None]] = {
            rank: [action for action in row if isinstance(action, _Action)] for rank, row in enumerate(rows)
        }
        self._prepare_schedule_with_comms(ours, format="compute_comms")
        self.pipeline_order_with_comms = dict(enumerate(map(list, rows)))
        table: dict[Any, Callable[..., Any]] = self._comp_type_to_function_map
        table |= functions

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **more: Any
    ) -> None:
        self.before_step({"arguments": arg_mbs, "keyword arguments": kwarg_mbs, "targets": target_mbs})
        if not self._has_backward:
            with ExitStack() as methods:  # an evaluation would reduce and divide gradients of the step before
                for stage in stages_of_schedule(self):
                    methods.enter_context(replaced(stage, {"perform_reduce_grad": lambda factor: None}))
                super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, *args, **more)
            return
        with self.around_step(target_mbs):
            super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, *args, **more)

    def _maybe_compute_loss(
        self, stage: PipelineStage, output: Any, target_mbs: Any, mb_index: int, *more: Any
    ) -> None:
        """`more`: the loss's named arguments, which torch 2.11 does not have."""
        with self.around_loss(stage, mb_index):
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *more)  # type: ignore[no-untyped-call]
