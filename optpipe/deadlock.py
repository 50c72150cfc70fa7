"""Why a schedule cannot run: the ops that wait for each other in a circle, shown on the device-by-position grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import ScheduleError
from optpipe.ops import Kind, Op

AROUND = 6  # positions shown before and after the ops on the cycle
MAX_ROWS = 16  # devices shown


class DeadlockError(ScheduleError):
    """Ops that wait for each other. `cycle` lists them, each waiting for the next and the last for the first; the message shows them."""

    def __init__(self, message: str, cycle: list[Op]) -> None:
        super().__init__(message)
        self.cycle = cycle


def deadlock_error(
    table: NDArray[np.int32],
    device: NDArray[np.int64],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    needs: NDArray[np.int64],
    done: NDArray[np.bool_],
) -> DeadlockError:
    """The error for a simulation that left some ops undone; arguments as `optpipe.timeline.longest_path` has them."""
    cycle = _cycle(table, order, begins, needs, done)
    ops = [_op(table[row]) for row in cycle]
    waits = " waits for ".join(str(op) for op in [*ops, ops[0]])
    return DeadlockError(f"deadlock: {waits}\n{_grid(table, device, cycle)}", ops)


def _cycle(
    table: NDArray[np.int32], order: NDArray[np.int64], begins: NDArray[np.int64], needs: NDArray[np.int64], done: NDArray[np.bool_]
) -> list[int]:
    """Follows undone ops, each to one it waits for, until an op comes again."""
    before = np.full(len(table), -1)  # the op before on the same stream
    before[order[1:]] = order[:-1]
    before[order[begins[:-1][begins[:-1] < len(order)]]] = -1
    leads = np.zeros(len(table), dtype=np.bool_)
    leads[order] = True
    row = int(np.flatnonzero(~done & leads)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    while row not in seen:
        seen[row] = len(path)
        path.append(row)
        group = [row] if row + 1 >= len(table) or leads[row + 1] else [row, row + 1]
        waits_for = [int(n) for op in group for n in needs[op] if n >= 0 and not done[n]]
        if before[row] >= 0 and not done[before[row]]:
            waits_for.append(int(before[row]))
        row = waits_for[0] if leads[waits_for[0]] else waits_for[0] - 1  # the first op stands for a pair
    return path[seen[row] :]


def _op(row: NDArray[np.int32]) -> Op:
    kind, stage, microbatch, part, _ = row.tolist()
    return Op(Kind(kind), stage, microbatch, part)


def _grid(table: NDArray[np.int32], device: NDArray[np.int64], cycle: list[int]) -> str:
    """Devices as rows, positions in their programs as columns; the ops on the cycle in [brackets], around them some of their neighbours."""
    first_row = {int(d): int(np.searchsorted(device, d)) for d in np.unique(device)}
    position = {row: row - first_row[int(device[row])] for row in cycle}
    low, high = max(0, min(position.values()) - AROUND), max(position.values()) + AROUND
    involved = sorted({int(device[row]) for row in cycle})
    shown = involved[:MAX_ROWS] if len(involved) > 1 else [d for d in first_row if abs(d - involved[0]) <= 1]
    columns = [p for p in range(low, high + 1) if any(abs(p - q) <= AROUND for q in position.values())][: 4 * AROUND + 4]
    lines = []
    for d in shown:
        cells = []
        for p in columns:
            row = first_row[d] + p
            inside = row < len(table) and device[row] == d
            text = str(_op(table[row])) if inside else ""
            cells.append(f"[{text}]" if row in position and inside else f" {text} ")
        lines.append((f"device {d}", cells))
    width = max(len(cell) for _, cells in lines for cell in cells)
    header = "position".ljust(10) + "".join(str(p).center(width) for p in columns)
    return "\n".join([header, *(name.ljust(10) + "".join(cell.center(width) for cell in cells) for name, cells in lines)])
