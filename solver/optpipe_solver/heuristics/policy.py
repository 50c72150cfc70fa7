"""What tells one run of the list scheduler from another."""

from __future__ import annotations

from dataclasses import dataclass

from optpipe.evaluate.objective import TOLERANCE
from optpipe_solver.bounds.least_memory import Relief


@dataclass(frozen=True)
class Policy:
    """What the list scheduler prefers.

    Attributes
    ----------
    in_flight
        (S,) the most micro-batches between their forward and their backward at a stage.
    offload
        (S,) the share of the micro-batches whose activation leaves, if there is time for that.
    recompute
        (S,) the share of the micro-batches whose activation is computed again.
    split
        Whether backwards are split into B and W.
    patience
        A weight gradient waits for a backward that comes within this share of the weight gradient's time.
    eager
        A reload begins this many reload times before its backward is expected.
    order
        The micro-batches in the order in which they enter; empty for that of their numbers.
    level
        (S,) the level by which activations are computed again, of a stage with fewer levels its last one; empty for
        the first.
    """

    in_flight: tuple[int, ...]
    offload: tuple[float, ...]
    recompute: tuple[float, ...]
    split: bool = True
    patience: float = 0.0
    eager: float = 1.5
    order: tuple[int, ...] = ()
    level: tuple[int, ...] = ()

    def relief(self, stage: int, place: int, parts: int, levels: int) -> Relief:
        """Return what should become of one activation of a stage whose activations leave in so many parts, or are
        computed again by one of so many levels.

        Shares are spread evenly over the micro-batches, by their place in the order, and over the parts of each.
        """
        if leaving := _evenly(self.offload[stage] * parts, place):
            return Relief(tuple(range(leaving)))
        again = _evenly(self.recompute[stage], place) > 0
        level = self.level[stage] if self.level else 0
        return Relief(level=min(level, levels - 1)) if again else Relief()


def _evenly(each: float, place: int) -> int:
    """How many the micro-batch gets if each gets so many, a fraction, on average."""
    return int((place + 1) * each + TOLERANCE) - int(place * each + TOLERANCE)
