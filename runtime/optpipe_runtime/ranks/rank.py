"""`Rank`: what one rank of a pipeline has, shared by the executor and the profiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from optpipe_runtime.execute.optimizer import HostOptimizer
from optpipe_runtime.execute.stage import Passage, StageRunner
from optpipe_runtime.memory.peers import Peers
from optpipe_runtime.memory.pool import HostPool, Link
from optpipe_runtime.ranks.agreement import Council
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.mail import Mail
from optpipe_runtime.ranks.team import Team


@dataclass(frozen=True)
class Rank:
    """`stages`: those placed here."""

    team: Team
    layout: Layout
    device: torch.device
    stages: Mapping[int, StageRunner]
    council: Council
    mail: Mail
    pool: HostPool
    link: Link
    peers: Peers
    host_optimizers: Mapping[int, HostOptimizer] = field(default_factory=dict)  # by stage
    passages: dict[tuple[int, int], Passage] = field(
        default_factory=dict
    )  # by stage and route, of all ranks; learned in the first step

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
