"""PipeOffload (Wan et al. 2025): interleaved schedules that hold less, GIS and GIS-H; uniform ones that offload, PO-H
and PO-F.

A link runs offloads and reloads alternately, each in a slot of its own (`Slots`). Devices that share a link use it one
after the other.

The paper's letters: d devices, v looped stages on each, g micro-batches a group; T_F, T_B, T_W are f, b, w.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.objective import TOLERANCE
from optpipe.lift import lift_table
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.block import Block, slots
from optpipe_solver.systems.order import count_chunks, count_devices, distinct_slots, in_order, visits, warmed_up
from optpipe_solver.systems.system import published


@published("gis", "PipeOffload, Wan et al. 2025, section 3.1", most=None, chunks=2)
def gis(problem: Problem, group: int | None = None) -> Schedule:
    """GIS, the generalised interleaved schedule (section 3): a device changes its stage every `group` micro-batches.

    The default is d; W comes right after B.
    Rank i begins with g(v-1) + d - i forwards, the one before its first B included, then runs one backward, one
    forward. So rank 0 holds g(v-1) + d activations at most, whether they count until B or until W. Bubble: (d-1)(f+b),
    and for each of the v-1 changes of stage (d-g)f + max(0, db - g(b+w)) more: the paper's (d-g)(v-1) is meant in units
    of f = b = w, its Table 1 has g = d/2. Both hold where a group's time g(f+b+w) lets a forward, or a backward, pass
    all devices, df and db. A last group that is not full is run as if it were, without the micro-batches that are not
    there.
    """
    return _in_groups(problem, "gis", count_devices(problem) if group is None else group)


@published("gis-h", "PipeOffload, Wan et al. 2025, section 3.2", most=None, chunks=2)
def gis_h(problem: Problem, group: int | None = None) -> Schedule:
    """GIS-H: GIS with groups of ceil(d/2) micro-batches, the smallest in whose time a forward can pass all devices."""
    return _in_groups(problem, "gis-h", ceil(count_devices(problem) / 2) if group is None else group)


def _in_groups(problem: Problem, name: str, g: int) -> Schedule:
    d, m = count_devices(problem), problem.microbatches
    v = count_chunks(problem)
    if not ceil(d / 2) <= g <= d:
        raise InputError(f"group = {g}: {name} on {d} devices takes {ceil(d / 2)} to {d}")
    # The last group may have micro-batches that do not exist.
    groups = [range(first, first + g) for first in range(0, m, g)]
    there, back = visits(groups, range(v)), visits(groups, range(v)[::-1])
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for i in range(d):
        forwards = [Op(Kind.F, c * d + i, j) for c, j in there]
        backwards = [[Op(kind, c * d + i, j) for kind in (Kind.B, Kind.W)] for c, j in back]
        ops = warmed_up(forwards, backwards, g * (v - 1) + d - i - 1)
        lists[problem.stages[i].device] = [op for op in ops if op.microbatch < m]
    return in_order(problem, lists)


@published("po-h", "PipeOffload, Wan et al. 2025, sections 3.2 and 4.2", most=None, chunks=2)
def po_h(problem: Problem) -> Schedule:
    """PO-H: half of the stages leave, ceil(v/2) on each device.

    Where k is at most 1 about (v+2)/(8v) of M stays (Table 1), d(v+2)/8 activations, and up to 3.5 on their way.
    Bubble: Table 1's v(d-1)T, T = f + b + w, where d forwards and d backwards, each in whole slots, fit in d slots:
    ceil(df/T) + ceil(db/T) <= d (but for d = 3, v = 2). Elsewhere up to 3(v-2)/8 activations more and up to (vd-1)T.
    """
    return pipe_offload(problem, ceil(count_chunks(problem) / 2))


@published("po-f", "PipeOffload, Wan et al. 2025, sections 3.2 and 4.2", most=None, chunks=2)
def po_f(problem: Problem) -> Schedule:
    """PO-F: all stages leave.

    Where k is at most 1 a device holds three activations at most, whatever d and v are (the paper's experiments say
    about four). The bubble is bounded as PO-H's.
    """
    return pipe_offload(problem, count_chunks(problem))


def pipe_offload(problem: Problem, leaving: int) -> Schedule:
    """PipeOffload (sections 2, 3.2, 4.2): GIS-H's block repeated uniformly, `leaving` stages a device offloaded.

    Of the stages that can leave, those with the longest lifespan do. An activation of theirs, or a part of one, that
    finds no slot in time stays. All stages count as lasting as long as the longest, and nothing is squeezed before the
    transfers have their slots, so that the links keep up. The resulting programs run as soon as they can.
    """
    block, slot_ms = uniform_block(problem)
    interval = slot_ms * count_chunks(problem)
    launches = [j * interval for j in range(problem.microbatches)]
    lives = [(start + block.lasts[0], end) for start, end in zip(block.forward, block.backward, strict=True)]
    leave = {
        d: longest_lived([s for s in problem.stages_on(d) if problem.stages[s].can_offload], lives)[:leaving]
        for d in range(len(problem.devices))
    }
    transfers: list[tuple[int, int, int, int, int]] = []
    begins: list[float] = []
    for sharers in _links(problem, leave):
        for d, (offloads, reloads) in zip(sharers, _slots(problem, leave, sharers, lives, slot_ms), strict=True):
            for s in leave[d]:
                visits = [
                    (j, part) for j in range(problem.microbatches) for part in range(problem.stages[s].offload_parts)
                ]
                stays = [(lives[s][0] + launches[j], lives[s][1] + launches[j]) for j, _ in visits]
                for visit, found in zip(visits, fill(offloads, reloads, stays, interval, slot_ms), strict=True):
                    if found:
                        transfers += [(Kind.O, s, *visit, 0), (Kind.R, s, *visit, 0)]
                        begins += found
    table, start = slots(block, launches)
    return lift_table(
        problem, np.concatenate([table, np.array(transfers, dtype=np.int32).reshape(-1, 5)]), np.r_[start, begins]
    )


def longest_lived(stages: Iterable[int], lives: Sequence[tuple[float, float]]) -> list[int]:
    """Selective offload (section 2): sort stages by the time between forward and backward, the longest first.

    The longer activations live, the more of them there are at a time.
    """
    return sorted(stages, key=lambda s: lives[s][0] - lives[s][1])


def uniform_block(problem: Problem) -> tuple[Block, float]:
    """Return a block like GIS-H's, in ms, to be repeated every v slots, and how long a slot is.

    A slot is F, B and W of the longest stage. Rank i computes in slots that begin i·x ms after rank 0's. To the next
    rank a forward needs x ms and a backward n·T - x, so that F, B and W stand in the same places of all slots; n is 1
    unless messages take longer than W leaves time for. A stage starts a whole number of slots after the one before, the
    fewest in which a forward, or on the way back a backward, can pass all devices: both together d where n is 1 and d f
    and d b, each rounded up, leave room for it; d/2 each where f = b and d is even, as in GIS-H. If that puts two
    stages of a device in one slot, being a multiple of v apart, the later one takes the next slot that is free (the
    paper's minor modifications).
    """
    d, v = count_devices(problem), count_chunks(problem)
    f, b, w = (float(problem.costs.ms[kind].max()) for kind in (Kind.F, Kind.B, Kind.W))
    if f + b + w == 0:
        f = b = w = 1.0  # nothing lasts: any order of the paper's unit model will do
    h, T = float(problem.costs.message_ms.max()), f + b + w
    n = _whole((f + b + 2 * h) / T)
    there_g, back_g = _intervals(d * (f + h) / T, d * (b + h) / T, n * d)
    x = max(f + h, n * T - (back_g * T - b - h) / max(1, d - 1))
    there = distinct_slots(0, v, there_g)
    back = distinct_slots(there[-1], v, back_g)[::-1]
    forward = [there[c] * T + i * x for c in range(v) for i in range(d)]
    backward = [(back[c] + n * (d - 1 - i)) * T + i * x + f for c in range(v) for i in range(d)]
    return Block(forward, backward, [start + b for start in backward], (f, b, w)), T


def _intervals(there: float, back: float, both: int) -> tuple[int, int]:
    """Return the slots between a device's stages on the way there and on the way back.

    Whole numbers, no fewer than these, and together as few as can be but no fewer than `both`; slack is shared evenly.
    """
    fewest = _whole(there), _whole(back)
    both = max(both, sum(fewest))
    pairs = [(g, both - g) for g in range(fewest[0], both - fewest[1] + 1)]
    return min(pairs, key=lambda pair: (abs((pair[0] - there) - (pair[1] - back)), pair[1]))


def _whole(slots: float) -> int:
    return ceil(slots - TOLERANCE)


def _links(problem: Problem, leave: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Group the devices with stages that leave by the link that they share."""
    links: dict[int, list[int]] = {}
    for d, link in enumerate(problem.costs.link.tolist()):
        if leave[d]:
            links.setdefault(link, []).append(d)
    return list(links.values())


def _slots(
    problem: Problem,
    leave: Mapping[int, Sequence[int]],
    sharers: Sequence[int],
    lives: Sequence[tuple[float, float]],
    slot_ms: float,
) -> list[tuple[Slots, Slots]]:
    """Make the slots of the devices that share a link, from the end of the first forward on.

    There is one each way for each slot of a device or, where activations leave in parts, for each part.
    """
    ms = problem.costs.ms
    lengths = [(float(ms[Kind.O, leave[d]].max()), float(ms[Kind.R, leave[d]].max())) for d in sharers]
    parts = max(problem.stages[s].offload_parts for d in sharers for s in leave[d])
    begin = min(lives[s][0] for s in leave[sharers[0]])
    return staggered(lengths, begin, slot_ms / parts, problem.transfer_mode == "half_duplex")


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
