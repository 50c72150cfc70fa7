"""What tells one list-scheduling heuristic from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe_solver.bounds.least_memory import Relief


@dataclass(frozen=True)
class Policy:
    """What a heuristic wants. Sequences have an entry a stage; None limits nothing, or relieves nothing."""

    in_flight: Sequence[int] | None = None  # most micro-batches between their forward and their backward at a stage
    before: Sequence[int] | None = (
        None  # forwards that a stage starts, if it can, before its first backward, though that may wait for them
    )
    split: bool = True  # B and W, or both fused
    offload: Sequence[float] | None = (
        None  # share of the micro-batches whose activation leaves, where there is time for it
    )
    recompute: Sequence[float] | None = None  # share of the micro-batches whose activation is computed again
    patience: float = 0.0  # a weight gradient waits for a backward that comes within this share of its time
    # as if each op took everywhere as long as where it takes longest: more regular, so less is in each other's way
    alike: bool = False
    eager: float = 1.5  # a reload begins this many reload times before its backward is expected

    def wish(self, stage: int, microbatch: int, parts: int) -> Relief:
        """What becomes of one activation; the shares are spread evenly over the micro-batches, and over the parts of
        each."""

        def falls(shares: Sequence[float] | None, of: int) -> int:
            share = shares[stage] * of if shares else 0.0
            return int((microbatch + 1) * share + 1e-9) - int(microbatch * share + 1e-9)

        leaving = falls(self.offload, parts)
        return Relief(tuple(range(leaving))) if leaving else Relief(recompute=falls(self.recompute, 1) > 0)
