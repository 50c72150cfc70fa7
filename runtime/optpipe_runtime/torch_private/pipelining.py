"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

Action = _Action  # one entry of a row
StageBase = _PipelineStageBase  # of all kinds of stages
WAITS_FOR_SENDS = hasattr(_ComputationType, "WAIT_SEND_F")  # whether rows tell when a message must have been sent


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
        known: dict[int, list[_Action | None]] = {
            rank: [action for action in row if isinstance(action, _Action)] for rank, row in enumerate(rows)
        }
        self._prepare_schedule_with_comms(known, format="compute_comms")
        self.pipeline_order_with_comms = dict(enumerate(map(list, rows)))
        table: dict[Any, Callable[..., Any]] = self._comp_type_to_function_map
        table |= functions

    @property
    def stages(self) -> list[Any]:
        """Those of this rank."""
        stages: list[Any] = self._stages
        return stages

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **more: Any
    ) -> None:
        self.before_step({"arguments": arg_mbs, "keyword arguments": kwarg_mbs, "targets": target_mbs})
        if not self._has_backward:  # an evaluation
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
