"""`Rank`: what one rank of a pipeline has, shared by the executor and the profiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optpipe_runtime.agreement import Council
from optpipe_runtime.mail import Mail
from optpipe_runtime.pool import HostPool, Link
from optpipe_runtime.stage import StageRunner


@dataclass(frozen=True)
class Rank:
    """`stages`: those placed here; `placement`: the rank of every stage."""

    number: int
    placement: tuple[int, ...]
    microbatches: int
    device: torch.device
    stages: Mapping[int, StageRunner]
    council: Council
    mail: Mail
    pool: HostPool
    link: Link
    full_duplex: bool

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.placement) - 1
