"""What tells one list-scheduling heuristic from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe.evaluate.objective import TOLERANCE
from optpipe_solver.bounds.least_memory import Relief


@dataclass(frozen=True)
class Policy:
    """What a heuristic prefers. Sequences have an entry for each stage; None sets no limit, or relieves nothing.

    Attributes
    ----------
    in_flight
        The most micro-batches between their forward and their backward at a stage.
    before
        How many forwards a stage starts, if it can, before its first backward, although that may have to wait for them.
    split
        Whether backwards are split into B and W.
    offload
        The share of the micro-batches whose activation leaves, if there is time for that.
    recompute
        The share of the micro-batches whose activation is computed again.
    patience
        A weight gradient waits for a backward that comes within this share of the weight gradient's time.
    alike
        Whether each op counts as long as on the stage where it takes longest: schedules become more regular.
    eager
        A reload begins this many reload times before its backward is expected.
    """

    in_flight: Sequence[int] | None = None
    before: Sequence[int] | None = None
    split: bool = True
    offload: Sequence[float] | None = None
    recompute: Sequence[float] | None = None
    patience: float = 0.0
    alike: bool = False
    eager: float = 1.5

    def relief(self, stage: int, microbatch: int, parts: int) -> Relief:
        """Return what should become of one activation of a stage whose activations leave in so many parts.

        Shares are spread evenly over the micro-batches, and over the parts of each.
        """

        def count(shares: Sequence[float] | None, of: int) -> int:
            share = shares[stage] * of if shares else 0.0
            return int((microbatch + 1) * share + TOLERANCE) - int(microbatch * share + TOLERANCE)

        leaving = count(self.offload, parts)
        return Relief(tuple(range(leaving))) if leaving else Relief(recompute=count(self.recompute, 1) > 0)
