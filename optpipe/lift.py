"""`lift`: from times to programs; `prune`: offloads that buy nothing go; `with_host_updates`: optimizers on the host.

A solver that works with start times gets a schedule that runs no later. All ops are put in one global order, by start,
that keeps precedence. Whatever a program adds (a transfer waits for the compute op before it, a compute op for the drop
before it) points forward in that order, so the programs cannot deadlock.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import InputError
from optpipe.evaluate.graph import nominal_ms
from optpipe.evaluate.objective import reaches
from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import NONE, Flags, Floats, Ints, Table
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import COMPUTE, INWARD, OPTIMIZER, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, Program, link_orders, of_kinds
from optpipe.schedule import Schedule

TOLERANCE_MS = 1e-6  # times closer than this are the same moment
MOVES = (Kind.O, Kind.D, Kind.R, Kind.E, Kind.L)  # what becomes of an activation that leaves


def lift(problem: Problem, starts: Mapping[Op, float], method: str = "") -> Schedule:
    """Programs and shared links' orders from the start (ms) of every F, B, W, BW, C, O, R, E and L.

    An F and a backward that start together on one device become a pair where the problem has an `overlap_factor`. Drops
    are derived: each as early as its offload has ended, and never so that compute waits for it; so is the room on the
    peer, which is made when an eviction starts and let go when the load has ended.
    """
    table = np.array([(*op, 0) for op in starts], dtype=np.int32).reshape(-1, 5)
    return lift_table(problem, table, np.fromiter(starts.values(), dtype=np.float64, count=len(table)), method)


def lift_table(problem: Problem, table: Table, start: Floats, method: str = "") -> Schedule:
    """As `lift`, from rows of a program's table (n, 5) and their starts (n,)."""
    table = table.copy()
    rows = Rows(table, problem.costs.device[table[:, STAGE]])
    duration = nominal_ms(problem, rows, Index(problem, rows))
    first, second = _pairs(problem, table, start, duration)
    table[first, JOINED] = 1
    factor = problem.pair_factors[table[first, STAGE], table[second, STAGE]]
    duration[first] = duration[second] = factor * (duration[first] + duration[second])

    for kind, marks in ((Kind.O, (Kind.D,)), (Kind.E, (Kind.D, Kind.A, Kind.V))):
        leaving = table[table[:, KIND] == kind]
        table = np.concatenate([table, *(leaving for _ in marks)])
        table[len(table) - len(leaving) * len(marks) :, KIND] = np.repeat(marks, len(leaving))
    derived = len(table) - len(start)
    duration = np.r_[duration, np.zeros(derived)]
    start, phase = _forward_in_time(problem, table, np.r_[start, np.full(derived, -np.inf)], duration)
    start[first] = start[second] = np.maximum(start[first], start[second])

    moment = np.rint(start / grain(start))
    # At one moment, what takes no time comes first, one micro-batch after the other to hold little.
    lasts = duration > 2 * grain(start)
    order = np.lexsort((table[:, PART], phase, table[:, MICROBATCH], lasts, moment))
    rank = np.empty(len(table), dtype=np.int64)
    rank[order] = np.arange(len(table))
    rank[second] = rank[first]

    device = problem.costs.device[table[:, STAGE]]
    device = np.where(of_kinds(table, Kind.A, Kind.V), problem.costs.peer[device], device)
    joins = np.zeros(len(table), dtype=np.bool_)
    joins[second] = True
    slot = _slots(table, device, start, start + duration, rank, joins)
    slot[second] = slot[first]
    in_program = np.lexsort((joins, rank, of_kinds(table, *COMPUTE), slot, device))
    ends = np.searchsorted(device[in_program], np.arange(len(problem.devices) + 1))
    programs = tuple(Program(table[in_program[a:b]]) for a, b in pairwise(ends))
    by_rank = in_program[np.argsort(rank[in_program], kind="stable")]
    return Schedule(problem, programs, link_orders(problem.shared_links, table[by_rank], device[by_rank]), method)


def grain(start: Floats) -> float:
    """What is one moment: the tolerance, or float noise where times are huge."""
    return TOLERANCE_MS + 1e-12 * float(np.abs(start[np.isfinite(start)]).max(initial=0.0))


def _pairs(problem: Problem, table: Table, start: Floats, duration: Floats) -> tuple[Ints, Ints]:
    """Rows of the ops that run together: F and B of two micro-batches that start at one moment on one device."""
    nothing = np.empty(0, dtype=np.int64)
    if problem.overlap_factor is None or len(table) == 0:
        return nothing, nothing
    lasting = duration > 2 * grain(start)
    lasting &= of_kinds(table, *COMPUTE)
    rows = np.flatnonzero(lasting)
    rows = rows[np.argsort(start[rows])]
    moment = np.cumsum(np.diff(start[rows], prepend=-np.inf) > grain(start))  # rounding would divide some
    device = problem.costs.device[table[rows, STAGE]]
    by_time = np.lexsort((table[rows, KIND], moment, device))
    rows, device, moment = rows[by_time], device[by_time], moment[by_time]
    a, b = rows[:-1], rows[1:]
    together = (device[:-1] == device[1:]) & (moment[:-1] == moment[1:])
    together &= table[a, MICROBATCH] != table[b, MICROBATCH]
    together &= (table[a, KIND] == Kind.F) & of_kinds(table[b], *problem.paired)
    return a[together], b[together]


def _forward_in_time(problem: Problem, table: Table, start: Floats, duration: Floats) -> tuple[Floats, Ints]:
    """Each op's start, moved behind what it depends on where float noise or a drop's unknown time had it before that,
    and its phase: how far along its micro-batch's way it is, for ties."""
    costs = problem.costs
    index = Index(problem, Rows(table, costs.device[table[:, STAGE]]))
    at = {kind: index.rows_of(kind) for kind in (Kind.F, Kind.C, Kind.W)} | {Kind.B: index.rows_of(Kind.B, Kind.BW)}
    away, drops, back_again = index.moving(Kind.O, Kind.E), index.parts(Kind.D), index.moving(Kind.R, Kind.L)
    rooms, vacated = index.parts(Kind.A), index.parts(Kind.V)
    start, duration = np.r_[start, -np.inf], np.r_[duration, 0.0]  # row -1, no op, ends before all time
    phase = np.zeros(len(start), dtype=np.int64)

    def move(rows: Ints, after: Floats, step: int) -> Floats:
        start[rows] = np.where(rows >= 0, np.maximum(start[rows], after), -np.inf)
        phase[rows] = step
        ended: Floats = start[rows] + duration[rows]
        return ended

    noise = grain(start)
    for r, route in enumerate(problem.all_routes):
        passing = np.flatnonzero(costs.route == r)
        reached = np.full(len(passing), -np.inf)
        returned: dict[int, Floats] = {}  # when a stage's activation is there for its backward
        for k, s in enumerate(route):
            reached = move(at[Kind.F][s, passing], reached + costs.message_ms[FORWARDS, s, passing], 4 * k)
            reloaded = reached[:, None]
            if costs.can_offload[s] or costs.levels.can_offload[:, s].any() or costs.can_evict[s]:
                leaving, returning = away[s, passing], back_again[s, passing]
                left = move(leaving, reached[:, None], 4 * k + 1)
                move(rooms[s, passing], start[leaving[:, :1]], 4 * k + 1)
                # Noise must not move the drop on.
                move(drops[s, passing], np.maximum(start[leaving], left - noise), 4 * k + 2)
                step = 4 * (2 * len(route) - k) - 2
                reloaded = move(returning, left, step)
                move(vacated[s, passing], np.maximum(start[returning], reloaded - noise)[:, :1], step)
            back = np.maximum(reached, reloaded.max(axis=1))
            recomputed = move(at[Kind.C][s, passing], back, 4 * (2 * len(route) - k) - 1)
            returned[s] = np.maximum(recomputed, back)
        gradient = np.full(len(passing), -np.inf)
        for k, s in reversed(list(enumerate(route))):
            step = 4 * (2 * len(route) - k)
            gradient = np.maximum(gradient + costs.message_ms[GRADIENTS, s, passing], returned[s])
            gradient = move(at[Kind.B][s, passing], gradient, step)
            move(at[Kind.W][s, passing], gradient, step + 1)
    return start[:-1], phase[:-1]


def _slots(table: Table, device: Ints, start: Floats, end: Floats, rank: Ints, joins: Flags) -> Ints:
    """(n,) slots: compute ops are numbered along their device, the others come before the compute op with their number.

    A transfer, or a room on the peer, comes after the compute ops that have ended at its start, a transfer also after
    its forward even where the times overlap; a drop before the first that starts when its offload has ended.
    """
    slot = np.zeros(len(table), dtype=np.int64)
    compute = of_kinds(table, *COMPUTE)
    for d in np.unique(device):
        computing = np.flatnonzero(compute & ~joins & (device == d))
        computing = computing[np.argsort(rank[computing])]
        slot[computing] = np.arange(len(computing))
        others = np.flatnonzero(~compute & (device == d))
        slot[others] = np.searchsorted(rank[computing], rank[others])
        moving = others[of_kinds(table[others], *TRANSFERS, Kind.A)]
        ended = np.searchsorted(np.maximum.accumulate(end[computing]), start[moving] + grain(start), side="right")
        slot[moving] = np.minimum(slot[moving], ended)
    forward = np.zeros(table[:, [STAGE, MICROBATCH]].max(axis=0, initial=0) + 1, dtype=np.int64)
    forwards = table[:, KIND] == Kind.F
    forward[tuple(table[forwards][:, [STAGE, MICROBATCH]].T)] = slot[forwards] + 1
    others = np.flatnonzero(~compute & ~of_kinds(table, Kind.A, Kind.V))
    slot[others] = np.maximum(slot[others], forward[tuple(table[others][:, [STAGE, MICROBATCH]].T)])
    _keep_order(table, device, rank, slot)
    return slot


def _falls(slot: Ints, group: NDArray[np.integer[Any]]) -> Flags:
    """Where the slot is less than that of the row before in the same group; (n,) and (n, any)."""
    falls: Flags = (np.diff(slot) < 0) & (group[1:] == group[:-1]).all(axis=1)
    return falls


def _keep_order(table: Table, device: Ints, rank: Ints, slot: NDArray[np.int64]) -> None:
    """Where a compute op spans the time from an offload's end to its reload's start, the reload comes after it, as its
    drop does, and the device's later transfers after that."""
    others = np.flatnonzero(of_kinds(table, *MOVES))
    moving = others[of_kinds(table[others], *TRANSFERS)]
    by_device = moving[np.lexsort((rank[moving], device[moving]))]
    by_activation = others[np.lexsort((rank[others], *table[others, STAGE : PART + 1].T))]
    if not (
        _falls(slot[by_device], device[by_device, None]).any()
        or _falls(slot[by_activation], table[by_activation, STAGE : PART + 1]).any()
    ):
        return
    others = others[np.argsort(rank[others])]
    reached: dict[int, int] = {}
    before: dict[tuple[int, ...], int] = {}  # of the same activation
    rows = zip(others.tolist(), device[others].tolist(), table[others, :4].tolist(), slot[others].tolist(), strict=True)
    for row, d, (kind, *activation), s in rows:
        s = max(s, before.get(tuple(activation), 0))
        if kind != Kind.D:
            s = reached[d] = max(s, reached.get(d, 0))
        before[tuple(activation)] = slot[row] = s


def prune(schedule: Schedule) -> Schedule:
    """The same schedule without the offloads and evictions whose bytes fit all the time. Nothing starts later, since
    fewer ops wait for each other.

    Those go first that keep compute waiting longest: a drop for its offload's end, a backward for its reload's.
    """
    problem, compiled = schedule.problem, schedule.compiled
    rows, index, during = compiled.rows, compiled.index, compiled.held.during.copy()
    frees, limit = compiled.effects.frees, problem.costs.activation_budget
    backward, waits = index.rows_of(Kind.B, Kind.BW), np.zeros(len(rows))  # waits of compute before each op
    stream = np.flatnonzero(~rows.transfer)
    after, before = stream[1:], stream[:-1]
    waits[after] = (compiled.timeline.start[after] - compiled.timeline.end[before]) * (
        rows.device[after] == rows.device[before]
    )
    leaving, returning = index.moving(Kind.O, Kind.E), index.moving(Kind.R, Kind.L)
    useless = np.zeros(leaving.shape, dtype=np.bool_)
    offloads = []  # wait, and the rows of O, D and R, or of E, D and L
    for s, j, p in np.argwhere(leaving != NONE).tolist():
        offload, drop, reload = (int(rows_of[s, j, p]) for rows_of in (leaving, index.parts(Kind.D), returning))
        offloads.append((max(waits[drop], waits[backward[s, j]]), offload, drop, reload))
    for _, offload, drop, reload in sorted(offloads, key=lambda found: (-found[0], found[1])):
        away = slice(drop + 1, reload)
        if during[away].max(initial=0) + frees[drop] <= limit[rows.device[offload]]:
            during[away] += frees[drop]
            useless[tuple(rows.table[offload, STAGE : PART + 1])] = True

    def useful(table: Table) -> Table:
        moves = of_kinds(table, *MOVES, Kind.A, Kind.V)
        part = np.where(moves, table[:, PART], 0)
        return table[~(moves & useless[table[:, STAGE], table[:, MICROBATCH], part])]

    return schedule.with_tables(useful) if useless.any() else schedule


def with_host_updates(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """The same schedule with the optimizers of some stages on the host (Chronos-Offload, Lin et al. 2025, section 5).

    A list scheduler places G, U and P: each takes the first time when its link or host is idle for long enough between
    the transfers there, P in the order in which stages first need them, G and U in the order in which their backwards
    end. A P that finds none before its stage's first F comes right before it, and may delay it. All other ops keep
    their order; activation memory is no more than before.

    `stages` are by default all with `update_ms`; G, U and P of others are removed. Raises InputError if one of them has
    no `update_ms`, ScheduleError if the schedule cannot run.
    """
    problem = schedule.problem
    schedule = schedule.with_tables(lambda table: table[~of_kinds(table, *OPTIMIZER)])
    costs, compiled, timeline = problem.costs, schedule.compiled, schedule.timeline
    chosen = sorted(set(np.flatnonzero(costs.can_update).tolist() if stages is None else stages))
    for s in chosen:
        if not (0 <= s < len(problem.stages) and costs.can_update[s]):
            raise InputError(f"stages[{s}].update_ms is missing: its optimizer cannot run on the host")
    rows, full_duplex = timeline.rows, problem.transfer_mode == "full_duplex"
    busy: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)  # by device, or by link and way

    def stream(kind: int, d: int) -> list[tuple[float, float]]:
        return busy[(d,) if kind == Kind.U else (int(costs.link[d]), full_duplex and kind in INWARD)]

    for row in np.flatnonzero(rows.on_host_link).tolist():
        insort(stream(rows.kind[row], rows.device[row]), (float(timeline.start[row]), float(timeline.end[row])))
    needed, ended = np.full(len(problem.stages), np.inf), np.zeros(len(problem.stages))
    forwards, backwards = rows.of_kinds(Kind.F), rows.of_kinds(Kind.BW, Kind.W)
    np.minimum.at(needed, rows.stage[forwards], timeline.start[forwards])
    np.maximum.at(ended, rows.stage[backwards], timeline.end[backwards])
    placed: list[tuple[Kind, int, float]] = []

    def place(kind: Kind, s: int, ready: float, latest: float = np.inf) -> float:
        """Take the first time that is free from `ready` on, and return its end."""
        transfers, ms = stream(kind, int(costs.device[s])), float(costs.ms[kind, s, 0])
        for start, end in transfers:
            if reaches(ready + ms, start):
                break
            ready = max(ready, end)
        insort(transfers, (ready, ready + ms))
        placed.append((kind, s, min(ready, latest)))
        return ready + ms

    for s in sorted(chosen, key=needed.__getitem__):
        place(Kind.P, s, 0.0, latest=float(needed[s]))
    for s in sorted(chosen, key=lambda s: (ended[s], -s)):
        place(Kind.U, s, place(Kind.G, s, float(ended[s])))
    # A transfer stands behind the ops that have ended when it starts; of what is at one moment P comes first, G last.
    added = np.array([(kind, s, 0, 0, 0) for kind, s, _ in placed], dtype=np.int32).reshape(-1, 5)
    table, device = np.concatenate([rows.table, added]), np.r_[rows.device, costs.device[added[:, STAGE]]]
    rank = np.r_[compiled.places, np.where(added[:, KIND] == Kind.P, -1, len(rows))]
    at = np.r_[np.where(rows.transfer, timeline.start, timeline.end), [begin for *_, begin in placed]]
    order = np.lexsort((rank, at))
    merged = Schedule.in_order(problem, table[order], device[order])
    return replace(schedule, programs=merged.programs, links=merged.links)
