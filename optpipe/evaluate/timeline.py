"""When every op runs: the longest path over data dependencies, program order, links and drops; or which ops wait for
each other in a circle.

An op starts when the op before it on its stream and the ops that it needs (`optpipe.evaluate.graph`) have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.graph import Needs, Streams
from optpipe.evaluate.jit import LazyJit
from optpipe.evaluate.rows import Rows
from optpipe.model.arrays import Flags, Floats, Ints, Table
from optpipe.model.ops import COMPUTE, MARKS, Op, Pair
from optpipe.model.program import JOINED

AROUND = 6  # positions shown before and after the ops on the cycle, fewer where there are many
MAX_COLUMNS = 28  # positions shown
MAX_ROWS = 16  # devices shown
MAX_WAITS = 40  # ops named in the sentence


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Timeline:
    """When each op runs: arrays over all ops, device after device in program order, times in milliseconds."""

    rows: Rows
    start: Floats  # (n,)
    end: Floats  # (n,)

    @property
    def table(self) -> Table:
        """(n, 5) the programs' rows."""
        return self.rows.table

    @property
    def device(self) -> Ints:
        """(n,) the device of each row."""
        return self.rows.device

    @cached_property
    def makespan_ms(self) -> float:
        """First start to last end."""
        return float(self.end.max() - self.start.min()) if len(self.end) else 0.0

    @cached_property
    def span_ms(self) -> float:
        """The longest first-start-to-last-end of one device (OptPipe, Eq. 3)."""
        return max((float(self.end[rows].max() - self.start[rows].min()) for rows in self._by_device()), default=0.0)

    def busy_ms(self) -> list[float]:
        """Compute time of each device that has ops."""
        alone = self.rows.of_kinds(*COMPUTE) & ~self.rows.second  # a pair's time counts once
        return [float((self.end - self.start)[rows][alone[rows]].sum()) for rows in self._by_device()]

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the devices do not compute, on average."""
        busy = self.busy_ms()
        return 1.0 - sum(busy) / (len(busy) * self.makespan_ms) if busy and self.makespan_ms else 0.0

    def _by_device(self) -> list[Ints]:
        """Rows of each device that has ops, without marks: room that is made for a peer is no part of its own time."""
        lasting, device = np.flatnonzero(~self.rows.of_kinds(*MARKS)), self.rows.device
        return np.split(lasting, np.flatnonzero(np.diff(device[lasting])) + 1) if len(lasting) else []


def timed(rows: Rows, needs: Needs, streams: Streams, duration_ms: Floats) -> Timeline:
    """Times every op as early as the schedule allows. Raises DeadlockError where ops wait for each other."""
    n = len(rows)
    start, end, done = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.bool_)
    joined = rows.table[:, JOINED] == 1
    _longest_path(n, streams.order, streams.begins, needs.rows, needs.delay_ms, duration_ms, joined, start, end, done)
    if not done.all():
        raise deadlock_error(rows, needs, streams, done)
    return Timeline(rows, start, end)


def timed_samples(rows: Rows, waits: Ints, delay_ms: Floats, duration_ms: Floats) -> tuple[Floats, Floats]:
    """The start and the end of every op in ms, (n, samples) each, where each sample has its own times.

    `waits` as `waits_of` gives them, `delay_ms` (n, k, samples or 1) how long ago those must have ended, `duration_ms`
    (n, samples). The schedule must be free of deadlocks.
    """
    start, end = np.zeros_like(duration_ms), np.zeros((len(rows) + 1, duration_ms.shape[1]))  # the last row is for NONE
    delayed = delay_ms.max(axis=(0, 2)) > 0
    leads = np.flatnonzero(~rows.second)
    depth = depths(waits, leads)
    ranked = leads[np.argsort(depth[leads], kind="stable")]
    for group in np.split(ranked, np.flatnonzero(np.diff(depth[ranked])) + 1):  # each waits for earlier groups only
        begin = start[group]
        for column in range(waits.shape[1]):
            ended = end[waits[group, column]]
            if delayed[column]:
                ended += delay_ms[group, column]
            np.maximum(begin, ended, out=begin)
        start[group] = begin
        end[group] = begin + duration_ms[group]
    start[rows.second], end[:-1][rows.second] = start[rows.first], end[rows.first]
    return start, end[:-1]


def depths(waits: Ints, leads: Ints) -> Floats:
    """(n,) for each row in `leads`, how many ops at most come before it, each waiting for the one before."""
    n = len(waits)
    depth, end, done = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.bool_)
    alone, none = np.arange(len(leads) + 1), np.zeros(n, dtype=np.bool_)
    _longest_path(n, leads, alone, waits, np.zeros(n), np.ones(n), none, depth, end, done)
    return depth


def longest_path(
    order: Any, begins: Any, needs: Any, delay: Any, duration: Any, joined: Any, start: Any, end: Any, done: Any
) -> None:
    """Fills `start`, `end` and `done`; ops on a cycle, and those behind one, stay undone.

    Advances every stream as far as it goes. A stream that must wait is queued at the op that it waits for and woken
    when that has ended.
    """
    streams = len(begins) - 1
    head = begins[:-1].copy()
    free_at = np.zeros(streams)
    queue = np.full(len(start), -1, dtype=np.int64)  # the stream woken first when an op ends
    next_woken = np.full(streams, -1, dtype=np.int64)  # the one woken after it
    ready = np.arange(streams)
    count = streams
    while count > 0:
        count -= 1
        stream = ready[count]
        while head[stream] < begins[stream + 1]:
            row = order[head[stream]]
            last = row + 1 if joined[row] else row
            begin = free_at[stream]
            blocker = -1
            for op in range(row, last + 1):
                for column in range(needs.shape[1]):
                    needed = needs[op, column]
                    if needed >= 0:
                        if not done[needed]:
                            blocker = needed
                            break
                        ended = end[needed] + (delay[op] if column == 1 else 0.0)
                        begin = max(begin, ended)
            if blocker >= 0:
                next_woken[stream] = queue[blocker]
                queue[blocker] = stream
                break
            free_at[stream] = begin + duration[row]
            head[stream] += 1
            for op in range(row, last + 1):
                start[op] = begin
                end[op] = free_at[stream]
                done[op] = True
                while queue[op] >= 0:
                    ready[count] = queue[op]
                    queue[op] = next_woken[queue[op]]
                    count += 1


_longest_path = LazyJit(longest_path)


class DeadlockError(ScheduleError):
    """Ops that wait for each other. The message shows them on the device-by-position grid.

    `cycle` lists them: each waits for the next, and the last for the first. Of ops that only follow each other on one
    stream, the first and the last are listed.
    """

    def __init__(self, message: str, cycle: list[Op | Pair]) -> None:
        super().__init__(message)
        self.cycle = cycle


def deadlock_error(rows: Rows, needs: Needs, streams: Streams, done: Flags) -> DeadlockError:
    """The error for a simulation after which only the ops marked in `done` (n,) have run."""
    cycle = _cycle(rows, needs, streams, done)
    items = [rows.item(row) for row in cycle]
    waits = [str(item) for item in [*items, items[0]]]
    if len(waits) > MAX_WAITS:
        waits[MAX_WAITS // 2 : -MAX_WAITS // 2] = [f"{len(waits) - MAX_WAITS} more that wait so"]
    return DeadlockError(f"deadlock: {' waits for '.join(waits)}\n{_grid(rows, cycle)}", items)


def _cycle(rows: Rows, needs: Needs, streams: Streams, done: Flags) -> list[int]:
    """Follows undone ops, each to one it waits for, until an op comes again; then leaves out who only follows on its
    stream."""
    before, second = streams.before(len(rows)), rows.second
    row = int(np.flatnonzero(~done & ~second)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    while row not in seen:
        seen[row] = len(path)
        path.append(row)
        group = [row, row + 1] if row + 1 < len(rows) and second[row + 1] else [row]
        waits_for = [int(needed) for op in group for needed in needs.rows[op] if needed >= 0 and not done[needed]]
        if before[row] >= 0 and not done[before[row]]:
            waits_for.append(int(before[row]))
        row = waits_for[0] - int(second[waits_for[0]])  # the first op stands for a pair
    cycle = path[seen[row] :]
    ahead, behind = [*cycle[1:], cycle[0]], [cycle[-1], *cycle[:-1]]
    return [row for row, a, b in zip(cycle, ahead, behind, strict=True) if before[row] != a or before[b] != row]


def _grid(rows: Rows, cycle: list[int]) -> str:
    """Devices as rows, positions in their programs as columns; the ops on the cycle in [brackets], with some of their
    neighbours."""
    device = rows.device
    first_row = {int(d): int(np.searchsorted(device, d)) for d in np.unique(device)}
    involved = sorted({int(device[row]) for row in cycle})
    shown = involved[:MAX_ROWS] if len(involved) > 1 else [d for d in first_row if abs(d - involved[0]) <= 1]
    positions = {row - first_row[int(device[row])] for row in cycle if int(device[row]) in shown}
    for around in range(AROUND, -1, -1):
        columns = sorted({p for q in positions for p in range(max(0, q - around), q + around + 1)})
        if len(columns) <= MAX_COLUMNS:
            break
    marked = {*cycle, *(row + 1 for row in cycle if rows.table[row, JOINED])}
    lines = []
    for d in shown:
        cells = []
        for p in columns[:MAX_COLUMNS]:
            row = first_row[d] + p
            text = str(rows.op(row)) if row < len(rows) and device[row] == d else ""
            cells.append(f"[{text}]" if text and row in marked else f" {text} ")
        lines.append((f"device {d}", cells))
    width = max(len(cell) for _, cells in lines for cell in cells)
    header = "position".ljust(11) + "".join(str(p).center(width) for p in columns[:MAX_COLUMNS])
    grid = [header, *(name.ljust(11) + "".join(cell.center(width) for cell in cells) for name, cells in lines)]
    if len(involved) > MAX_ROWS:
        grid.append(f"and {len(involved) - MAX_ROWS} more devices")
    return "\n".join(grid)
