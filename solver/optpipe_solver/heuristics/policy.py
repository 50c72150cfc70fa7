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
    """

    in_flight: tuple[int, ...]
    offload: tuple[float, ...]
    recompute: tuple[float, ...]
    split: bool = True
    patience: float = 0.0
    eager: float = 1.5
    order: tuple[int, ...] = ()

    def relief(self, stage: int, place: int, parts: int) -> Relief:
        """Return what should become of one activation of a stage whose activations leave in so many parts.

        Shares are spread evenly over the micro-batches, by their place in the order, and over the parts of each.
        """
        if leaving := _evenly(self.offload[stage] * parts, place):
            return Relief(tuple(range(leaving)))
        return Relief(recompute=_evenly(self.recompute[stage], place) > 0)


def _evenly(each: float, place: int) -> int:
    """How many the micro-batch gets if each gets so many, a fraction, on average."""
    return int((place + 1) * each + TOLERANCE) - int(place * each + TOLERANCE)
