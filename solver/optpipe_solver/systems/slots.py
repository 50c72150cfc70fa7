"""Slots for offloads and reloads (PipeOffload, section 4.2 and appendix D): a link runs one offload and one reload in
turn, each in a slot of its own; devices that share a link take turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

TOLERANCE = 1e-9  # of a pitch


@dataclass
class Slots:
    """One device's slots for transfers one way: slot n lasts `length` ms from `first` + n·`pitch` on; n may be
    negative."""

    first: float
    pitch: float
    length: float
    taken: set[int] = field(default_factory=set)

    def start(self, n: int) -> float:
        return self.first + n * self.pitch

    def within(self, begin: float, end: float) -> range:
        """The slots that start no earlier and end no later."""
        lowest, most = (begin - self.first) / self.pitch, (end - self.length - self.first) / self.pitch
        return range(ceil(lowest - TOLERANCE), floor(most + TOLERANCE) + 1)

    def take(self, slots: Iterable[int]) -> float | None:
        """The start of the first of these that is free; nobody else gets it."""
        for n in slots:
            if n not in self.taken:
                self.taken.add(n)
                return self.start(n)
        return None


def staggered(
    lengths: Sequence[tuple[float, float]], begin: float, pitch: float, half_duplex: bool
) -> list[tuple[Slots, Slots]]:
    """The slots for offloads and for reloads of each device of one link, from how many ms these last at most.

    One device's offload and the next one's reload stand together, as in the paper's synchronized interleaved transfers:
    at one time or, on a link that carries one transfer at a time, one behind the other. After the last device it is the
    first one's turn again, `pitch` ms after its last, or as soon after as the link allows. A device that has a link for
    itself so offloads at the beginning of each pitch, the first of which is at `begin`, and has reloaded by its end.
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
    """When each of these activations, in order of time, leaves and comes back; None for one that finds no time for
    both, and stays.

    `stays` says when its forward ends and its backward starts. From left to right each takes the first free slot behind
    its forward, then from right to left the last one before its backward. Who would have to wait longer than `patience`
    for a link that is too slow stays, or those behind would wait ever longer; who would not be `away` for so long
    stays, too.
    """
    leaves = [offloads.take(offloads.within(begin, begin + patience + offloads.length)) for begin, _ in stays]
    found: list[tuple[float, float] | None] = []
    for (_, end), leaving in zip(reversed(stays), reversed(leaves), strict=True):
        both = None
        if leaving is not None:
            returning = reloads.take(reversed(reloads.within(leaving + offloads.length + away, end)))
            both = None if returning is None else (leaving, returning)
        found.append(both)
    return found[::-1]
