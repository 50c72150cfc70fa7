"""`Rank`: what one rank of a pipeline has. The executor, the profiler and the pipeline share it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from optpipe.model.ops import Kind
from optpipe_runtime.execute.host_optimizer import HostOptimizer
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.memory.peers import Peers
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage.io import StageIO
from optpipe_runtime.stage.runner import StageRunner


@dataclass
class Rank:
    """`stages` and `host_optimizers` are those of this rank, by stage. `io` holds what the stages of all ranks get and
    give, by stage and route; it is learned in the first step. `layout` changes with a schedule for another number of
    micro-batches. `whole_gradients`: of how many stages this rank may hold whole gradients of sharded parameters; None
    for all."""

    team: Team
    layout: Layout
    device: torch.device
    stages: Mapping[int, StageRunner]
    replicas: Replicas
    cpu_group: CpuGroup
    messages: Messages
    pool: HostPool
    link: Link
    peers: Peers
    host_optimizers: Mapping[int, HostOptimizer] = field(default_factory=dict)
    io: dict[tuple[int, int], StageIO] = field(default_factory=dict)
    whole_gradients: int | None = None

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

    def message_bytes(self, message: Message) -> int:
        """The bytes of a message between any two ranks. Its stages must have been learned."""
        io = self.io[message.stage, self.layout.microbatch_routes[message.microbatch]]
        return sum(spec.nbytes for spec in (io.inputs if message.kind == Kind.F else io.output_gradients))

    def close(self) -> None:
        """Ends the threads of this rank, once its last messages have left."""
        with suppress(LostError):
            self.messages.flush()
        self.link.close()
        self.peers.close()
        for optimizer in self.host_optimizers.values():
            optimizer.close()
        self.team.end()
