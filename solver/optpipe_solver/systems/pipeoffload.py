"""PipeOffload (Wan et al. 2025): interleaved schedules that hold less, GIS and GIS-H; uniform ones that offload, PO-H
and PO-F; AdaOffload as OptPipe prints it.

The paper's letters: d devices, v looped stages on each, g micro-batches a group; T_F, T_B, T_W are f, b, w.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, floor, inf

import numpy as np

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import TOLERANCE
from optpipe.formats.megatron import visits
from optpipe.lift import lift_table
from optpipe.model.arrays import Floats, Table
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from optpipe_solver import tuning
from optpipe_solver.systems.block import Block, slots
from optpipe_solver.systems.system import (
    count_chunks,
    count_devices,
    distinct_slots,
    in_order,
    published,
    warmed_up,
)

AHEAD = 2  # compute ops before its backward at which Algorithm 1 starts a reload: those of PipeOffload's slot


@published("gis", "PipeOffload, Wan et al. 2025, section 3.1", most=None, chunks=2)
def gis(problem: Problem, group: int | None = None, leaving: int = 0) -> Schedule:
    """GIS, the generalised interleaved schedule (section 3): a device changes its stage every `group` micro-batches.

    The default is the largest group that fits the memory (section 3.2), at most d. W comes right after B. Rank i begins
    with g(v-1) + d - i forwards, the one before its first B included, then runs one backward, one forward: rank 0 holds
    g(v-1) + d activations at most. Bubble: (d-1)(f+b), and for each of the v-1 changes of stage (d-g)f + max(0, db -
    g(b+w)) more, where a group's time g(f+b+w) lets a forward, or a backward, pass all devices, df and db. A last group
    that is not full is run as if it were, without the micro-batches that are not there.

    `leaving` stages a device are offloaded, those whose activations live longest (section 2); nothing waits for that.

    Raises InputError if `group` is not from d/2 to d, or devices have fewer stages than `leaving`, or none that can.
    """
    if group is not None:
        return _in_groups(problem, group, leaving)
    d, of = count_devices(problem), cache(lambda g: _in_groups(problem, g, leaving))
    sizes = range(ceil(d / 2), d + 1)
    fitting = bisect(sizes, False, key=lambda g: not of(g).compiled.certificate.fits)  # a smaller group holds less
    return of(sizes[max(0, fitting - 1)])


@published("gis-h", "PipeOffload, Wan et al. 2025, section 3.2", most=None, chunks=2)
def gis_h(problem: Problem, leaving: int = 0) -> Schedule:
    """GIS-H: GIS with groups of ceil(d/2) micro-batches, the smallest in whose time a forward can pass all devices."""
    return _in_groups(problem, ceil(count_devices(problem) / 2), leaving)


def _in_groups(problem: Problem, g: int, leaving: int) -> Schedule:
    d, v, m = count_devices(problem), count_chunks(problem), problem.microbatches
    if not ceil(d / 2) <= g <= d:
        raise InputError(f"group = {g}: gis on {d} devices takes {ceil(d / 2)} to {d}")
    groups = [range(first, first + g) for first in range(0, m, g)]  # the last one may have more than there are
    there, back = visits(groups, range(v)), visits(groups, range(v)[::-1])
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for i in range(d):
        forwards = [Op(Kind.F, c * d + i, j) for c, j in there]
        backwards = [[Op(kind, c * d + i, j) for kind in (Kind.B, Kind.W)] for c, j in back]
        ops = warmed_up(forwards, backwards, g * (v - 1) + d - i - 1)
        lists[problem.stages[i].device] = [op for op in ops if op.microbatch < m]
    return with_offloads(in_order(problem, lists), leaving)


def with_offloads(schedule: Schedule, leaving: int) -> Schedule:
    """Offload the `leaving` stages a device whose activations live longest (section 2); nothing waits for that.

    Raises InputError if devices have fewer stages, or none that can.
    """
    problem = schedule.problem
    if not leaving:
        return schedule
    if leaving > (most := count_chunks(problem) if problem.costs.can_offload.any() else 0):
        raise InputError(f"leaving = {leaving}: expected 0 to {most}, the stages of a device with offload_ms")
    timeline, at, (f, b, w) = schedule.timeline, schedule.compiled.index.rows_of, _longest(problem)
    lives = timeline.end[at(Kind.F)], timeline.start[at(*BACKWARD)]
    return _offloaded(problem, timeline.table, timeline.start, lives, leaving, f or b + w)


@published("po-h", "PipeOffload, Wan et al. 2025, sections 3.2 and 4.2", most=None, chunks=2)
def po_h(problem: Problem) -> Schedule:
    """PO-H: half of the stages leave, ceil(v/2) on each device.

    About (v+2)/(8v) of M stays (Table 1), d(v+2)/8 activations; where k is at most 1 up to 3.5 more are in use and on
    their way. The bubble is at most v(d-1)T, T = f + b + w. Both where d forwards and d backwards, each in whole slots,
    fit in d slots; elsewhere up to 3(v-2)/8 activations more and up to (vd-1)T.
    """
    return pipe_offload(problem, ceil(count_chunks(problem) / 2))


@published("po-f", "PipeOffload, Wan et al. 2025, sections 3.2 and 4.2", most=None, chunks=2)
def po_f(problem: Problem) -> Schedule:
    """PO-F: all stages leave.

    Where k is at most 1 a device holds three activations at most, whatever d and v are. The bubble is bounded as
    PO-H's.
    """
    return pipe_offload(problem, count_chunks(problem))


def pipe_offload(problem: Problem, leaving: int) -> Schedule:
    """PipeOffload (sections 2, 3.2, 4.2): GIS-H's block repeated uniformly, `leaving` stages a device offloaded.

    A link runs offloads and reloads alternately, each in a slot of its own; there is one each way for each slot of a
    device or, where activations leave in parts, for each part. An activation, or a part of one, that finds no slot in
    time stays. All stages count as lasting as long as the longest, and nothing is squeezed before the transfers have
    their slots, so that the links keep up. The resulting programs run as soon as they can.
    """
    v = count_chunks(problem)
    block, slot_ms = uniform_block(problem, v - leaving)
    table, start = slots(block, [j * v * slot_ms for j in range(problem.microbatches)])
    forward, backward, _ = start.reshape(3, len(problem.stages), -1)
    lives = forward + _longest(problem)[0], backward
    return _offloaded(problem, table, start, lives, leaving, slot_ms)


def _offloaded(
    problem: Problem, table: Table, start: Floats, lives: tuple[Floats, Floats], leaving: int, pitch: float
) -> Schedule:
    """Add transfers to rows of a program's table and their starts. The `leaving` stages a device are offloaded whose
    activations live longest (section 2).

    `lives`: from when to when each activation may be away, (S, m) each. `pitch`: as for `staggered`.
    """
    ms, links, slot_ms = problem.costs.ms, problem.costs.link.tolist(), sum(_longest(problem))
    patience = count_chunks(problem) * slot_ms
    leave: dict[int, list[int]] = {}  # by device
    for d in range(len(problem.devices)):
        able = [s for s in problem.stages_on(d) if problem.stages[s].can_offload]
        if leaves := sorted(able, key=lambda s: float((lives[0][s] - lives[1][s]).sum()))[:leaving]:
            leave[d] = leaves
    transfers: list[tuple[int, int, int, int, int]] = []
    begins: list[float] = []
    for link in dict.fromkeys(links[d] for d in leave):
        sharers = [d for d in leave if links[d] == link]
        lengths = [(float(ms[Kind.O, leave[d]].max()), float(ms[Kind.R, leave[d]].max())) for d in sharers]
        first = float(lives[0][leave[sharers[0]]].min())  # the end of the first forward
        parts = max(problem.stages[s].offload_parts for d in sharers for s in leave[d])
        each_way = staggered(lengths, first, pitch / parts, problem.transfer_mode == "half_duplex")
        for s, (offloads, reloads) in ((s, ways) for d, ways in zip(sharers, each_way, strict=True) for s in leave[d]):
            pieces = [(j, part) for j in range(problem.microbatches) for part in range(problem.stages[s].offload_parts)]
            stays = [(float(lives[0][s, j]), float(lives[1][s, j])) for j, _ in pieces]
            for piece, found in zip(pieces, fill(offloads, reloads, stays, patience, slot_ms), strict=True):
                if found:
                    transfers += [(Kind.O, s, *piece, 0), (Kind.R, s, *piece, 0)]
                    begins += found
    moves = np.array(transfers, dtype=np.int32).reshape(-1, 5)
    return lift_table(problem, np.concatenate([table, moves]), np.r_[start, begins])


def uniform_block(problem: Problem, staying: int = 0) -> tuple[Block, float]:
    """Return a block like GIS-H's, in ms, to be repeated every v slots, and how long a slot is.

    A slot is F, B and W of the longest stage. Rank i computes in slots that begin i·x ms after rank 0's. To the next
    rank a forward needs x ms and a backward n·T - x, so that F, B and W stand in the same places of all slots; n is 1
    unless messages take longer than W leaves time for. A stage starts a whole number of slots after the one before, the
    fewest in which a forward, or on the way back a backward, can pass all devices: both together d where n is 1 and d f
    and d b, each rounded up, leave room for it; d/2 each where f = b and d is even, as in GIS-H. If that puts two
    stages of a device in one slot, being a multiple of v apart, the later one takes the next slot that is free (the
    paper's minor modifications). The sum is divided so that the `staying` deepest stages live shortest, then evenly.
    """
    d, v, (f, b, w) = count_devices(problem), count_chunks(problem), _longest(problem)
    h, T = float(problem.costs.message_ms.max()), f + b + w
    n = _whole((f + b + 2 * h) / T)
    way_there, way_back = d * (f + h) / T, d * (b + h) / T  # slots between a device's stages
    both = max(n * d, _whole(way_there) + _whole(way_back))
    choices = []
    for there_g in range(_whole(way_there), both - _whole(way_back) + 1):
        back_g, there = both - there_g, distinct_slots(0, v, there_g)
        back = distinct_slots(there[-1], v, back_g)[::-1]
        live = sum(back[v - staying :]) - sum(there[v - staying :])
        choices.append((live, abs((there_g - way_there) - (back_g - way_back)), back_g, there, back))
    _, _, back_g, there, back = min(choices)
    x = max(f + h, n * T - (back_g * T - b - h) / max(1, d - 1))
    forward = [there[c] * T + i * x for c in range(v) for i in range(d)]
    backward = [(back[c] + n * (d - 1 - i)) * T + i * x + f for c in range(v) for i in range(d)]
    return Block(forward, backward, [start + b for start in backward]), T


def _longest(problem: Problem) -> tuple[float, float, float]:
    """How long F, B and W last at most."""
    f, b, w = (float(problem.costs.ms[kind].max()) for kind in (Kind.F, Kind.B, Kind.W))
    return (f, b, w) if f + b + w > 0 else (1.0, 1.0, 1.0)  # nothing lasts: the paper's unit model will do


def _whole(slots: float) -> int:
    return ceil(slots - TOLERANCE)


@dataclass
class Slots:
    """One device's slots for transfers one way: slot n lasts `length` ms from `first` + n·`pitch` on.

    n may be negative.
    """

    first: float
    pitch: float
    length: float
    taken: set[int] = field(default_factory=set)

    def within(self, begin: float, end: float) -> range:
        """Return the slots that start no earlier than `begin` and end no later than `end`."""
        lowest, most = (begin - self.first) / self.pitch, (end - self.length - self.first) / self.pitch
        return range(ceil(lowest - TOLERANCE), floor(most + TOLERANCE) + 1)

    def take(self, slots: Iterable[int]) -> float | None:
        """Take the first of these slots that is free, and return its start; None if none is free."""
        for n in slots:
            if n not in self.taken:
                self.taken.add(n)
                return self.first + n * self.pitch
        return None


def staggered(
    lengths: Sequence[tuple[float, float]], begin: float, pitch: float, half_duplex: bool
) -> list[tuple[Slots, Slots]]:
    """Make the slots for offloads and for reloads of each device of one link.

    One device's offload and the next one's reload stand together, as in the paper's synchronized interleaved transfers:
    at one time or, on a half-duplex link, one after the other. The first device's next slot is `pitch` ms after its
    last one, or as soon after as the link allows. So a device that has a link for itself offloads at the beginning of
    each pitch, the first of which is at `begin`, and has reloaded by its end. `lengths`: how many ms the offloads and
    the reloads of each device last at most.
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

    `stays` are from the end of a forward to the start of its backward (ms), in order of time. From left to right each
    takes the first free slot after its forward, then from right to left the last one before its backward. Who would
    wait for longer than `patience` ms stays, else those behind would wait longer and longer; who would not be away for
    `away` ms, too.
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


@published("algorithm-1", "OptPipe, Algorithm 1 as printed")
def algorithm_1(problem: Problem, tolerance: int | None = None) -> Schedule:
    """AdaOffload as printed (OptPipe, Algorithm 1), for one stage a device.

    Steps 1 and 2: a stage fills with forwards until the next one would delay its first backward by T or more
    (`delays`). Step 3, PipeOffload's rules: then one backward, its weight gradient right after it, and one forward take
    turns; every activation leaves after its forward and returns before its backward, but for those whose backward
    follows at once. A forward waits until the activation before it has left (line 18), which is all that keeps memory
    low: nothing asks for the limit, as the heuristic `adaoffload` does, which starts from here.

    T is `tolerance` ms. Without it, some T that differ are tried, more of the small ones; the shortest schedule that
    fits is returned, or else the shortest.

    Printed errors: line 18 reads F of the last micro-batch on the stage before, for F of the same one; line 19 uses the
    completion of F that line 20 computes.
    """
    late = delays(problem)
    choices = np.r_[0.0, np.unique(late[late > 0])]
    tries = min(tuning.VARIANTS, max(2, tuning.GENERATE_OPS // (3 * late.size)))
    places = np.unique(np.geomspace(1, len(choices) + 1, tries, endpoint=False).astype(int)) - 1
    schedules = (_filled(problem, late, T) for T in (choices[places] if tolerance is None else [tolerance]))
    try:
        return min(schedules, key=lambda schedule: (not schedule.compiled.certificate.fits, schedule.makespan_ms))
    except ScheduleError as error:
        raise InputError(f"algorithm-1 does not order the transfers of a shared link: {error}") from error


def delays(problem: Problem) -> Floats:
    """By stage and micro-batch, how late the first backward is after one more forward (steps 1 and 2, lines 6 to 20).

    In ms, of the first forward -inf. A stage's delays never fall, as it fills in the order of micro-batches.
    """
    ms, messages = problem.costs.ms, problem.costs.message_ms
    offload = ms[Kind.O] * problem.costs.parts[:, None]
    # EstStart(B_{s,0}): micro-batch 0 goes to the last stage and comes back.
    there, back = (ms[Kind.F, :, 0] + messages[FORWARDS, :, 0]).sum(), ms[Kind.B, 1:, 0] + messages[GRADIENTS, :-1, 0]
    late, ended = np.empty(offload.shape), [0.0] * problem.microbatches
    for s, row in enumerate(np.stack([ms[Kind.F], offload, messages[FORWARDS]], axis=2).tolist()):
        start, left = float(there + back[s:].sum()), -inf
        for j, (forward, leaves, message) in enumerate(row):
            late[s, j] = left + leaves - start  # line 16; F before has ended when its activation has left
            ended[j] = max(left, ended[j] + message) + forward
            left = ended[j] + leaves
    return np.maximum.accumulate(late, axis=1).round(9)  # so that equal ones are equal


def _filled(problem: Problem, late: Floats, tolerance_ms: float) -> Schedule:
    """Line 17, where no stage fills further than the one before, and step 3."""
    lists = []
    for s, fill in enumerate(np.minimum.accumulate((late < tolerance_ms).sum(axis=1)).tolist()):
        forwards = [Op(Kind.F, s, j) for j in range(problem.microbatches)]
        backwards = [[Op(kind, s, j) for kind in (Kind.B, Kind.W)] for j in range(problem.microbatches)]
        lists.append(_with_transfers(problem, s, warmed_up(forwards, backwards, fill - 1)))
    devices = [problem.stages_on(d) for d in range(len(problem.devices))]
    return Schedule(problem, tuple(Program.from_items(op for s in stages for op in lists[s]) for stages in devices))


def _with_transfers(problem: Problem, s: int, compute: list[Op]) -> list[Op]:
    """The stage's ops with O, D and R of the activations that leave."""
    place = {op: i for i, op in enumerate(compute)}
    ops = [(i, 3, op) for op, i in place.items()]
    for j in range(problem.microbatches if problem.stages[s].can_offload else 0):
        forward, back = place[Op(Kind.F, s, j)], place[Op(Kind.B, s, j)] - AHEAD
        drop = next((i for i in range(forward + 1, back) if compute[i].kind == Kind.F), back)
        for n, (kind, at) in enumerate(((Kind.O, forward + 1), (Kind.D, drop), (Kind.R, back))):
            ops += [(at, n, Op(kind, s, j, part)) for part in range(problem.stages[s].offload_parts) if back > forward]
    return [op for _, _, op in sorted(ops)]
