"""Slots for offloads and reloads (PipeOffload, section 4.2 and appendix D).

A link runs offloads and reloads alternately, each in a slot of its own. Devices that share a link use it one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from optpipe.evaluate.objective import TOLERANCE


@dataclass
class Slots:
    """One device's slots for transfers one way: slot n lasts `length` ms from `first` + n·`pitch` on.

    n may be negative.
    """

    first: float
    pitch: float
    length: float
    taken: set[int] = field(default_factory=set)

    def start(self, n: int) -> float:
        return self.first + n * self.pitch

    def within(self, begin: float, end: float) -> range:
        """Return the slots that start no earlier than `begin` and end no later than `end`."""
        lowest, most = (begin - self.first) / self.pitch, (end - self.length - self.first) / self.pitch
        return range(ceil(lowest - TOLERANCE), floor(most + TOLERANCE) + 1)

    def take(self, slots: Iterable[int]) -> float | None:
        """Take the first of these slots that is free, and return its start; None if none is free."""
        for n in slots:
            if n not in self.taken:
                self.taken.add(n)
                return self.start(n)
        return None


def staggered(
    lengths: Sequence[tuple[float, float]], begin: float, pitch: float, half_duplex: bool
) -> list[tuple[Slots, Slots]]:
    """Make the slots for offloads and for reloads of each device of one link.

    One device's offload and the next one's reload stand together, as in the paper's synchronized interleaved transfers:
    at one time or, on a half-duplex link, one after the other. The first device's next slot is `pitch` ms after its
    last one, or as soon after as the link allows. So a device that has a link for itself offloads at the beginning of
    each pitch, the first of which is at `begin`, and has reloaded by its end.

    Parameters
    ----------
    lengths
        How many ms the offloads and the reloads of each device last at most.
    """
    n = len(lengths)
    together = [(lengths[q][0], lengths[(q + 1) % n][1]) for q in range(n)]
    needs = [o + r if half_duplex else max(o, r) for o, r in together]
    idle = max(0.0, pitch - sum(needs)) / n
    pitch = max(pitch, sum(needs))
    offloads, reloads = [], []
    for (o, r), need in zip(together, needs, strict=True):
        end = begin + need + idle
        offloads.append(Slots(begin, pitch, o))
        reloads.append(Slots(end - r, pitch, r))
        begin = end
    return list(zip(offloads, [reloads[-1], *reloads[:-1]], strict=True))


def fill(
    offloads: Slots, reloads: Slots, stays: Sequence[tuple[float, float]], patience: float, away: float
) -> list[tuple[float, float] | None]:
    """Find when each of these activations leaves and comes back; None for one that finds no time for both, and stays.

    From left to right each takes the first free slot after its forward, then from right to left the last one before
    its backward.

    Parameters
    ----------
    stays
        When the forward of each ends and its backward starts (ms), in order of time.
    patience
        An activation that would wait longer than this (ms) for a link that is too slow stays; else those after it would
        wait longer and longer.
    away
        An activation that would not be away for so long (ms) stays.
    """
    leaves = [offloads.take(offloads.within(begin, begin + patience + offloads.length)) for begin, _ in stays]
    slots: list[tuple[float, float] | None] = []
    for (_, end), leaving in zip(reversed(stays), reversed(leaves), strict=True):
        both = None
        if leaving is not None:
            returning = reloads.take(reversed(reloads.within(leaving + offloads.length + away, end)))
            both = None if returning is None else (leaving, returning)
        slots.append(both)
    return slots[::-1]
