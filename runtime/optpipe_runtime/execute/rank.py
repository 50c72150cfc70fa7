"""`Rank`: what one rank of a pipeline has. The executor, the profiler and the pipeline share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Batch, Cut
from optpipe_runtime.execute.gradients import GradientMeans, Reductions
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.lowering.prepare import require_kinds, require_levels
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import LostError, Team
from optpipe_runtime.stage.io import StageIO
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.runner import StageRunner

# The kinds of op that need no feature.
PLAIN = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.D, Kind.R)


@dataclass
class Rank:
    """What one rank of a pipeline has."""

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

    @property
    def takes_inputs(self) -> bool:
        """Whether a route begins here."""
        return not self.layout.first.isdisjoint(self.stages)

    @property
    def takes_targets(self) -> bool:
        """Whether a route ends here."""
        return not self.layout.last.isdisjoint(self.stages)

    def cut(self, batch: Batch, microbatches: int) -> Cut:
        """What this rank has of each micro-batch. Raises `InputError` if the batch is none."""
        return batch.cut(microbatches, self.takes_inputs, self.takes_targets, self.stages)

    def message_bytes(self, message: Message) -> int:
        """The bytes of a message between any two ranks. Its stages must have been learned."""
        io = self.io[message.stage, self.forms[message.microbatch]]
        return sum(spec.nbytes for spec in (io.inputs if message.kind == Kind.F else io.output_gradients))

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Raises `ScheduleError` if this rank has no code for an op or a level, or a feature cannot run the
        schedule."""
        require_kinds(schedule, [*PLAIN, *(kind for feature in self.features for kind in feature.handlers)])
        require_levels(schedule, self.levels)
        for feature in self.features:
            feature.require(schedule, layout)

    def close(self) -> None:
        """Ends what the features do, and the threads of this rank, once its last messages have left. What fails leaves
        nothing else open."""
        with ExitStack() as last_first:
            for end in (self.team.end, self.reductions.close, self.link.close, self._flush):
                last_first.callback(end)
            for feature in self.features:
                last_first.callback(feature.close)

    def _flush(self) -> None:
        with suppress(LostError):
            self.messages.flush()
