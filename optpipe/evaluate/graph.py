"""Who waits for whom: a schedule's ops as rows of one table, the streams they stand on, and what each needs besides its
stream's order.

Compute ops, drops, accepts and vacates stand on their device's compute stream, offloads and reloads on their host link:
one stream a link where it is half duplex, one a direction where it is full duplex. Evictions and loads stand on a
stream of their own for each device that evicts: its link to its peer, one transfer at a time. Of optimizers on the
host, gradients and parameters take the host link, updates a stream of their own for each device, one at a time. The
second op of a pair stands on no stream of its own: it starts and ends with the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import ScheduleError
from optpipe.model.ops import EVICTION, HOST_LINK, INWARD, OPTIMIZER, PEER_LINK, TRANSFERS, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, of_kinds

if TYPE_CHECKING:
    from optpipe.schedule import Schedule

Table = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# What an op needs besides the op before it on its stream: the columns of `dependencies`.
OWN = 0  # the step before of the same stage and micro-batch
ACROSS = 1  # the neighbour stage's forward or backward; of an eviction the room on the peer
RESTORED = (
    2  # the reload, load or recompute that brings a backward's activation back; of a forward its stage's parameters
)
ISSUED = 3  # the op on the compute stream after which a transfer stands in its program


def flatten(schedule: Schedule) -> tuple[Table, Ints]:
    """All programs' rows one below the other, and the device of each row."""
    tables = [program.table for program in schedule.programs]
    device = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return np.concatenate(tables) if tables else np.empty((0, 5), np.int32), device


def describe(row: Table) -> str:
    kind, stage, microbatch, part, _ = row.tolist()
    return str(Op(Kind(kind), stage, microbatch, part))


def require_known(problem: Problem, table: Table, device: Ints) -> None:
    """Every op is of a stage on its device (A and V: on a device whose peer it is), of a micro-batch that passes it and
    of a part that it has; no pair without a factor."""
    costs, kind, stage, microbatch = problem.costs, table[:, KIND], table[:, STAGE], table[:, MICROBATCH]

    def refuse(wrong: Flags, why: str) -> None:
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise ScheduleError(f"{describe(table[i])} in the program of device {device[i]}: {why}")

    if len(table) == 0:
        return
    if int(device[-1]) >= len(problem.devices):
        raise ScheduleError(
            f"there is a program for device {device[-1]}, but the problem has {len(problem.devices)} devices"
        )
    refuse(stage >= len(problem.stages), f"there are {len(problem.stages)} stages")
    refuse(microbatch >= problem.microbatches, f"there are {problem.microbatches} micro-batches")
    accepting, optimizer = of_kinds(table, Kind.A, Kind.V), of_kinds(table, *OPTIMIZER)
    refuse(of_kinds(table, *EVICTION) & ~costs.can_evict[stage], "the stage has no evict_ms")
    refuse(accepting & (costs.peer[costs.device[stage]] != device), "the stage's device has another peer")
    refuse(~accepting & (costs.device[stage] != device), "the stage is on another device")
    refuse(optimizer & (microbatch > 0), "what happens once an iteration is written with micro-batch 0")
    refuse(optimizer & ~costs.can_update[stage], "the stage has no update_ms")
    refuse(
        ~optimizer & (costs.before[costs.route[microbatch], stage] == -2), "the micro-batch does not pass this stage"
    )
    refuse(of_kinds(table, Kind.O, Kind.R) & ~costs.can_offload[stage], "the stage has no offload_ms")
    refuse(
        (kind == Kind.D) & ~costs.can_offload[stage] & ~costs.can_evict[stage],
        "the stage has neither offload_ms nor evict_ms",
    )
    refuse(table[:, PART] >= costs.parts[stage], "the stage has fewer parts")
    refuse((kind == Kind.C) & ~costs.can_recompute[stage], "the stage has no recompute_ms")
    joined = table[:, JOINED] == 1
    refuse(joined & (problem.overlap_factor is None), "ops run together only where the problem has overlap_factor")


def durations(problem: Problem, table: Table) -> Floats:
    """Each op's nominal time; a pair's stands on its first op."""
    ms = problem.costs.ms[table[:, KIND], table[:, STAGE]]
    first = np.flatnonzero(table[:, JOINED] == 1)
    ms[first] = (problem.overlap_factor or 1.0) * (ms[first] + ms[first + 1])
    return ms


class Where:
    """Finds ops: row numbers by stage and micro-batch for each kind, -1 where there is none; the last one where it
    stands in parts."""

    def __init__(self, problem: Problem, table: Table) -> None:
        self._table = table
        self._shape = (len(problem.stages), problem.microbatches)
        self._parts = int(problem.costs.parts.max())

    def of(self, *kinds: Kind) -> Ints:
        """(S, m) row numbers of these kinds' ops."""
        rows = np.flatnonzero(of_kinds(self._table, *kinds))
        found = np.full(self._shape, -1)
        found[self._table[rows, STAGE], self._table[rows, MICROBATCH]] = rows
        return found

    def of_part(self, kind: Kind) -> Ints:
        """(S, m, parts) row numbers of O, D or R."""
        rows = np.flatnonzero(self._table[:, KIND] == kind)
        found = np.full((*self._shape, self._parts), -1)
        found[self._table[rows, STAGE], self._table[rows, MICROBATCH], self._table[rows, PART]] = rows
        return found


def dependencies(problem: Problem, table: Table, device: Ints) -> tuple[Ints, Floats]:
    """What each op needs: (n, 4) row numbers, -1 for nothing, and the delay in ms after the one in column `ACROSS`."""
    stage, microbatch, part = table[:, STAGE], table[:, MICROBATCH], table[:, PART]
    needs = np.full((len(table), 4), -1)
    delay = np.zeros(len(table))
    where = Where(problem, table)
    forward, backward = where.of(Kind.F), where.of(Kind.B, Kind.BW)
    offload, drop = where.of_part(Kind.O), where.of_part(Kind.D)
    restored = where.of(Kind.R, Kind.C, Kind.L)  # one of them at most; all parts' reloads stand on one stream, in order

    def rows_of(*kinds: Kind) -> Ints:
        return np.flatnonzero(of_kinds(table, *kinds))

    def put(rows: Ints, column: int, targets: Ints, what: str) -> None:
        if (targets < 0).any():
            i = rows[np.flatnonzero(targets < 0)[0]]
            raise ScheduleError(f"{describe(table[i])} in the program of device {device[i]} has no {what}")
        needs[rows, column] = targets

    after_forward, after_input = rows_of(Kind.B, Kind.BW, Kind.C, Kind.O, Kind.E), rows_of(Kind.W)
    put(after_forward, OWN, forward[stage[after_forward], microbatch[after_forward]], "forward")
    put(after_input, OWN, backward[stage[after_input], microbatch[after_input]], "input gradient")
    if of_kinds(table, *EVICTION).any():
        evicted, vacated = rows_of(Kind.E), rows_of(Kind.V)
        put(evicted, ACROSS, where.of(Kind.A)[stage[evicted], microbatch[evicted]], "room on the peer")
        put(vacated, OWN, where.of(Kind.L)[stage[vacated], microbatch[vacated]], "load")
        offload[:, :, 0] = np.maximum(offload[:, :, 0], where.of(Kind.E))
    dropped, brought = rows_of(Kind.D), rows_of(Kind.R, Kind.L)
    put(dropped, OWN, offload[stage[dropped], microbatch[dropped], part[dropped]], "offload or eviction")
    put(brought, OWN, drop[stage[brought], microbatch[brought], part[brought]], "drop")
    if of_kinds(table, *OPTIMIZER).any():
        sent, updated, forwards = rows_of(Kind.G), rows_of(Kind.U), rows_of(Kind.F)
        put(sent, OWN, where.of(Kind.W, Kind.BW).max(axis=1)[stage[sent]], "weight gradient")
        put(updated, OWN, where.of(Kind.G)[stage[updated], microbatch[updated]], "gradients")
        needs[forwards, RESTORED] = where.of(Kind.P)[stage[forwards], 0]

    costs = problem.costs
    for rows, neighbours, found in (
        (rows_of(Kind.F), costs.before, forward),
        (rows_of(Kind.B, Kind.BW), costs.after, backward),
    ):
        other = neighbours[costs.route[microbatch[rows]], stage[rows]]
        rows, other = rows[other >= 0], other[other >= 0]
        put(rows, ACROSS, found[other, microbatch[rows]], "neighbour stage's op to wait for")
        delay[rows] = np.where(costs.device[other] == costs.device[stage[rows]], 0.0, problem.p2p_ms)
    gradients = rows_of(Kind.B, Kind.BW)
    needs[gradients, RESTORED] = restored[stage[gradients], microbatch[gradients]]

    leads = ~is_transfer(table) & ~second_of_pair(table)
    last = np.maximum.accumulate(np.where(leads, np.arange(len(table)), -1))
    issued = np.flatnonzero(is_transfer(table) & (last >= 0))
    issued = issued[device[last[issued]] == device[issued]]
    needs[issued, ISSUED] = last[issued]
    return needs, delay


def second_of_pair(table: Table) -> Flags:
    """Marks the second op of each pair."""
    return np.r_[False, table[:-1, JOINED] == 1] if len(table) else np.zeros(0, np.bool_)


def is_transfer(table: Table) -> Flags:
    """Marks what runs beside compute."""
    return of_kinds(table, *TRANSFERS)


def on_host_link(table: Table) -> Flags:
    """Marks the transfers that devices with one `link` share."""
    return of_kinds(table, *HOST_LINK)


def streams(problem: Problem, schedule: Schedule, table: Table, device: Ints) -> tuple[Ints, Ints]:
    """Row numbers stream after stream, each in its order, and where each stream begins in that list (and, last, its
    length)."""
    devices, links = len(problem.devices), int(problem.costs.link.max()) + 1
    inward = of_kinds(table, *INWARD) & (problem.transfer_mode == "full_duplex")
    stream = np.where(on_host_link(table), devices + 2 * problem.costs.link[device] + inward, device)
    stream += of_kinds(table, *PEER_LINK) * (devices + 2 * links) + of_kinds(table, Kind.U) * 2 * (devices + links)
    position = np.arange(len(table))
    for link in problem.shared_links:
        ordered = _rows_on_link(problem, schedule, link, table, device)
        position[ordered] = np.arange(len(ordered))
    rows = np.flatnonzero(~second_of_pair(table))
    order = rows[np.lexsort((position[rows], stream[rows]))]
    return order, np.searchsorted(stream[order], np.arange(3 * devices + 2 * links + 1))


def _rows_on_link(problem: Problem, schedule: Schedule, link: str, table: Table, device: Ints) -> Ints:
    """The rows of a shared link's transfers in the order that the schedule gives, which keeps each device's program
    order."""
    own = np.flatnonzero(on_host_link(table) & np.isin(device, problem.shared_links[link]))
    if link not in schedule.links:
        if len(own) == 0:
            return own
        sharers = list(problem.shared_links[link])
        raise ScheduleError(
            f"links[{link!r}] is missing: devices {sharers} share it, so it needs the order of its transfers"
        )
    named = schedule.links[link].table
    where = Where(problem, table)
    known = (
        on_host_link(named)
        & (named[:, STAGE] < len(problem.stages))
        & (named[:, MICROBATCH] < problem.microbatches)
        & (named[:, PART] < int(problem.costs.parts.max()))
    )
    rows = np.full(len(named), -1)
    for kind in HOST_LINK:
        chosen = known & (named[:, KIND] == kind)
        rows[chosen] = where.of_part(kind)[named[chosen, STAGE], named[chosen, MICROBATCH], named[chosen, PART]]
    stray = ~np.isin(rows, own)
    if stray.any():
        raise ScheduleError(
            f"links[{link!r}]: {describe(named[np.flatnonzero(stray)[0]])} is in no program of a device on this link"
        )
    if len(rows) != len(own) or len(np.unique(rows)) != len(rows):
        raise ScheduleError(
            f"links[{link!r}] has {len(rows)} entries: the programs have {len(own)} transfers on it, each to be "
            "named once"
        )
    for d in problem.shared_links[link]:
        mine = rows[device[rows] == d]
        late = np.flatnonzero(np.diff(mine) < 0)
        if len(late):
            first, second = (describe(table[row]) for row in mine[late[0] : late[0] + 2])
            raise ScheduleError(
                f"links[{link!r}]: {first} stands before {second}, in the program of device {d} after it"
            )
    return rows
