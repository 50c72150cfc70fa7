"""The seam of the runtime: a kind of op is one `Handler`, and a `Feature` adds handlers and changes steps by hooks. Who
calls them knows no feature by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Tensors
from optpipe_runtime.stage.timer import Spread
from optpipe_runtime.stage.trial import Trials

F = TypeVar("F", bound="Feature")


class Done(NamedTuple):
    """What an op has made for its neighbour stage, and the copies that it has issued."""

    made: Tensors = ()
    copies: Sequence[Handle] = ()


class Handler(NamedTuple):
    """One kind of op on one rank. The executor posts and takes the op's message, and sends what the op has made.

    `run` runs the op, given its message; a forward without one gets the micro-batch's inputs. `held_bytes` are device
    bytes that the op's stage and micro-batch hold after it; None: the op changes nothing. `wait` waits for what the op
    needs beside its message, before its time starts. `abandon`, in a step that failed here, does for other ranks what
    they wait for from the op, with zeros, and returns the transfers to wait for; the flag tells whether it is the op
    that failed, else the op has not begun.
    """

    run: Callable[[StepRecord, Op, Tensors], Done]
    held_bytes: Callable[[Op], int] | None = None
    wait: Callable[[Op], object] = lambda op: None
    abandon: Callable[[Op, bool], Sequence[Handle]] = lambda op, failed: ()


class Feature:
    """What one room adds on one rank. Every hook does nothing unless a room overrides it."""

    handlers: Mapping[Kind, Handler] = {}  # the kinds of op that it adds
    irreversible = ""  # why no step of this pipeline can be undone, on all ranks alike; empty if it can

    # Before a schedule runs

    def require_own_schedules(self) -> None:
        """Raises `InputError` if steps cannot each have a schedule of their own."""

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Raises `ScheduleError` if it cannot run here; on every rank for the same reason. From any thread."""

    def profile(self, trials: Trials, clock: Clock, repeats: int) -> Mapping[int, Mapping[str, Spread]]:
        """Collective: measures its ops on the stages of all ranks. Returns, by stage, the times of those that `trials`
        have not noted; gradients need not stay as they are."""
        return {}

    # Inside a step: called by the executor

    @property
    def idle(self) -> bool:
        """Whether nothing of a step is left."""
        return True

    def start_plan(self, plan: Plan) -> None:
        """Before a training step by this plan, also one that this rank leaves out."""

    def start_step(self, step: StepRecord) -> None:
        """Before the first op."""

    def before_gather(self, stage: int) -> None:
        """Before the stage's sharded parameters begin to be gathered."""

    def before_op(self, step: StepRecord, op: Op) -> None:
        """Before the op waits for its message."""

    def before_forward(self, stage: int) -> None:
        """Before a forward whose input is there."""

    def after_op(self, step: StepRecord, op: Op) -> None:
        """After the op was issued and its bytes were counted."""

    def end_step(self, step: StepRecord) -> None:
        """After the last op."""

    def reduced_before(self, plan: Plan) -> Mapping[Op, int]:
        """For each op of this step before which a stage's whole gradients have been reduced, that stage."""
        return {}

    # Around a step: called by the step runner on all ranks

    def agree_on_step(self, plan: Plan | None, on_trial: bool) -> None:
        """Collective, before a step. `plan` is what runs in it for certain, None if that may change."""

    @property
    def is_fixed(self) -> bool:
        """Whether this step runs by the schedule that was agreed on, so that it is no trial and no swap comes first."""
        return False

    @property
    def may_correct(self) -> bool:
        """Whether `correct` may change something."""
        return False

    def is_wrong(self) -> bool:
        """Whether what was done between the last step and this one was not right, so that this one is undone."""
        return False

    def correct(self) -> bool:
        """Makes it right. Returns whether it was wrong."""
        return False

    def report_fields(self) -> Mapping[str, Any]:
        """Fields of the step's report."""
        return {}

    # Between two steps

    def synchronize(self) -> None:
        """Makes this rank's parameters those after the last update. Not collective."""

    def require_tie(self, tied: Sequence[nn.Parameter]) -> None:
        """Collective: raises `InputError` if these parameters cannot be tied."""

    def gradient_holders(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """For parameters whose gradients are elsewhere, what has them. Raises `InputError` on all ranks alike if they
        are nowhere any more, and cannot be clipped."""
        return {}

    def after_clipping(self) -> None:
        """After the gradients were clipped."""

    def close(self) -> None:
        """Ends its threads."""


def find_feature(features: Sequence[Feature], kind: type[F]) -> F | None:
    """The feature of a class, None if its room was left out."""
    return next((feature for feature in features if isinstance(feature, kind)), None)
