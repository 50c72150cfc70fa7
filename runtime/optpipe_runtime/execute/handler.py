"""The seam of the runtime: a kind of op is one `Handler`. A `Feature` adds the handlers of kinds that may be left out.
Who calls them knows no feature by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.memory.engines import Clock, Handle
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Tensors
from optpipe_runtime.stage.trial import Spread, Trials


class Done(NamedTuple):
    """What an op computes for its neighbour stage, and the copies that it has issued."""

    outputs: Tensors = ()
    copies: Sequence[Handle] = ()


class Handler(NamedTuple):
    """One kind of op on one rank. The executor posts and takes the op's message, and sends the op's outputs.

    `run` runs the op, with its message; a forward without one gets the micro-batch's inputs. `held_bytes` are device
    bytes that the op's stage and micro-batch hold after it; None: the op changes nothing. `wait` waits for what the op
    needs beside its message, before its time starts. `abandon`, in a step that failed here, does for other ranks what
    they wait for from the op, with zeros, and returns the transfers to wait for; the flag says whether it is the op
    that failed, else the op has not begun.
    """

    run: Callable[[StepRecord, Op, Tensors], Done]
    held_bytes: Callable[[Op], int] | None = None
    wait: Callable[[Op], object] = lambda op: None
    abandon: Callable[[Op, bool], Sequence[Handle]] = lambda op, failed: ()


class Feature:
    """Some kinds of op on one rank: their handlers, and what comes before the first op of a step and after the last.
    Every method does nothing unless a feature overrides it."""

    handlers: Mapping[Kind, Handler] = {}

    def start(self, plan: Plan, evaluating: bool) -> None:
        """Before a step, also before one that this rank leaves out."""

    def end(self, plan: Plan, evaluating: bool) -> None:
        """After the last op."""

    # Outside of steps

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Raises `ScheduleError` if it cannot run here; on every rank for the same reason. From any thread."""

    def profile(self, trials: Trials, clock: Clock, repeats: int) -> Mapping[int, Mapping[str, Spread]]:
        """Collective: measures its ops on the stages of all ranks. Returns, by stage, the times of those that `trials`
        have not noted; gradients need not stay as they are."""
        return {}

    def close(self) -> None:
        """Ends its threads."""
