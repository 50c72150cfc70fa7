"""`Rank`: what one rank of a pipeline has; the executor, the profiler and the pipeline share it. And the seam of the
runtime: a kind of op is one `Handler`, and a `Feature` adds the handlers of kinds that may be left out. Who calls them
knows no feature by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from optpipe.errors import InputError
from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Batch, Cut
from optpipe_runtime.execute.gradients import GradientMeans, Reductions
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import Message, Plan
from optpipe_runtime.lowering.prepare import require_kinds, require_levels
from optpipe_runtime.memory.engines import Clock, Handle
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import LostError, Team
from optpipe_runtime.stage.io import StageIO, Tensors
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.trial import Spread, Trials

# The kinds of op that need no feature.
PLAIN = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.D, Kind.R)


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

    run: Callable[[StepRecord, Op, Tensors], Done | None]
    held_bytes: Callable[[Op], int] | None = None
    wait: Callable[[Op], object] = lambda op: None
    abandon: Callable[[Op, bool], Sequence[Handle]] = lambda op, failed: ()


class Feature:
    """Some kinds of op on one rank: their handlers, and what comes before and after a step's ops. Every method does
    nothing unless a feature overrides it."""

    handlers: Mapping[Kind, Handler] = {}

    def start(self, plan: Plan, evaluating: bool) -> None:
        """Before a step, also before one that this rank leaves out."""

    def end(self, plan: Plan, evaluating: bool) -> None:
        """After the last op."""

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Raises `ScheduleError` if it cannot run here; on every rank for the same reason. From any thread."""

    def profile(self, trials: Trials, clock: Clock, repeats: int) -> Mapping[int, Mapping[str, Spread]]:
        """Collective: measures its ops on the stages of all ranks. Returns, by stage, the times of those that `trials`
        have not noted; gradients need not stay as they are."""
        return {}

    def close(self) -> None:
        """Ends its threads."""


@dataclass
class Rank:
    team: Team
    cpu_group: CpuGroup
    layout: Layout  # its number of micro-batches is that of the step
    device: torch.device
    stages: Mapping[int, StageRunner]  # those of this rank, by number
    replicas: Replicas
    reductions: Reductions
    means: GradientMeans
    messages: Messages
    pool: HostPool
    link: Link
    levels: Mapping[str, Level]  # those by which activations may be recomputed, by name
    features: Sequence[Feature] = ()  # kinds of op that may be left out
    # What the stages of all ranks get and give, by stage and form of micro-batch.
    io: dict[tuple[int, int], StageIO] = field(default_factory=dict)
    # By stage that is updated elsewhere: brings in its parameters after the last update.
    freshen: dict[int, Callable[[], object]] = field(default_factory=dict)
    forms: tuple[int, ...] = ()  # of each micro-batch of the step: k * routes + r for one of shape k on route r

    def __post_init__(self) -> None:
        self.microbatches = self.layout.microbatches  # of a whole batch; changes with a schedule for another number

    @property
    def whole_layout(self) -> Layout:
        """The layout of a step whose batch is cut here."""
        return self.layout.with_microbatches(self.microbatches)

    def set_microbatches(self, count: int) -> None:
        """The next step has so many. Raises `InputError` if it is not clear which routes they take."""
        if count == self.layout.microbatches:
            return
        if len(self.layout.routes) > 1:
            raise InputError(
                f"this step has {count} micro-batches: with several routes it must have {self.layout.microbatches}, "
                "each on its own"
            )
        self.layout = self.layout.with_microbatches(count)

    @property
    def number(self) -> int:
        return self.team.number

    def cut(self, batch: Batch, microbatches: int) -> Cut:
        """What this rank has of each micro-batch: inputs where a route begins, targets where one ends. Raises
        `InputError` if the batch is none."""
        begins, ends = (not stages.isdisjoint(self.stages) for stages in (self.layout.first, self.layout.last))
        return batch.cut(microbatches, begins, ends, self.stages)

    def held_bytes(self, op: Op) -> int:
        """Device bytes of activations of the op's stage and micro-batch, here."""
        return self.stages[op.stage].held_bytes(op.microbatch)

    def message_bytes(self, message: Message) -> int:
        """The bytes of a message between any two ranks. Its stages must have been learned."""
        io = self.io[message.stage, self.forms[message.microbatch]]
        return sum(spec.nbytes for spec in (io.inputs if message.kind == Kind.F else io.output_gradients))

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Raises `ScheduleError` if this rank has no code for an op or level, or a feature cannot run it."""
        require_kinds(schedule, [*PLAIN, *(kind for feature in self.features for kind in feature.handlers)])
        require_levels(schedule, self.levels)
        for feature in self.features:
            feature.require(schedule, layout)

    def close(self) -> None:
        """Ends the threads here once the last messages have left. What fails leaves nothing else open."""
        with ExitStack() as last_first:
            for end in (self.team.end, self.reductions.close, self.link.close, self._flush):
                last_first.callback(end)
            for feature in self.features:
                last_first.callback(feature.close)

    def _flush(self) -> None:
        with suppress(LostError):
            self.messages.flush()
