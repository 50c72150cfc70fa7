"""Why a schedule cannot run: the ops that wait for each other in a circle, shown on the device-by-position grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import ScheduleError
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.program import JOINED

AROUND = 6  # positions shown before and after the ops on the cycle, fewer where there are many
MAX_COLUMNS = 28  # positions shown
MAX_ROWS = 16  # devices shown
MAX_WAITS = 40  # ops named in the sentence


class DeadlockError(ScheduleError):
    """Ops that wait for each other. `cycle` lists them, each waiting for the next and the last for the first; the
    message shows them.

    Of ops that only stand in line, one behind the other on their stream, the first and the last are listed.
    """

    def __init__(self, message: str, cycle: list[Op | Pair]) -> None:
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
    """The error for a simulation that left some ops undone; arguments as `optpipe.evaluate.timeline.longest_path` has
    them."""
    cycle = _cycle(table, order, begins, needs, done)
    items = [_item(table, row) for row in cycle]
    waits = [str(item) for item in [*items, items[0]]]
    if len(waits) > MAX_WAITS:
        waits[MAX_WAITS // 2 : -MAX_WAITS // 2] = [f"{len(waits) - MAX_WAITS} more that wait so"]
    return DeadlockError(f"deadlock: {' waits for '.join(waits)}\n{_grid(table, device, cycle)}", items)


def _cycle(
    table: NDArray[np.int32],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    needs: NDArray[np.int64],
    done: NDArray[np.bool_],
) -> list[int]:
    """Follows undone ops, each to one it waits for, until an op comes again; then leaves out who only stands in
    line."""
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
    cycle = path[seen[row] :]
    ahead, behind = [*cycle[1:], cycle[0]], [cycle[-1], *cycle[:-1]]
    return [row for row, a, b in zip(cycle, ahead, behind, strict=True) if before[row] != a or before[b] != row]


def _item(table: NDArray[np.int32], row: int) -> Op | Pair:
    """The op of a row, or the pair that begins there."""
    return Pair(_op(table[row]), _op(table[row + 1])) if table[row, JOINED] else _op(table[row])


def _op(row: NDArray[np.int32]) -> Op:
    kind, stage, microbatch, part, _ = row.tolist()
    return Op(Kind(kind), stage, microbatch, part)


def _grid(table: NDArray[np.int32], device: NDArray[np.int64], cycle: list[int]) -> str:
    """Devices as rows, positions in their programs as columns; the ops on the cycle in [brackets], around them some of
    their neighbours."""
    first_row = {int(d): int(np.searchsorted(device, d)) for d in np.unique(device)}
    involved = sorted({int(device[row]) for row in cycle})
    shown = involved[:MAX_ROWS] if len(involved) > 1 else [d for d in first_row if abs(d - involved[0]) <= 1]
    columns = _columns({row - first_row[int(device[row])] for row in cycle if int(device[row]) in shown})
    marked = {*cycle, *(row + 1 for row in cycle if table[row, JOINED])}
    lines = []
    for d in shown:
        cells = []
        for p in columns:
            row = first_row[d] + p
            text = str(_op(table[row])) if row < len(table) and device[row] == d else ""
            cells.append(f"[{text}]" if text and row in marked else f" {text} ")
        lines.append((f"device {d}", cells))
    width = max(len(cell) for _, cells in lines for cell in cells)
    header = "position".ljust(11) + "".join(str(p).center(width) for p in columns)
    grid = [header, *(name.ljust(11) + "".join(cell.center(width) for cell in cells) for name, cells in lines)]
    if len(involved) > MAX_ROWS:
        grid.append(f"and {len(involved) - MAX_ROWS} more devices")
    return "\n".join(grid)


def _columns(positions: set[int]) -> list[int]:
    """The positions of the ops on the cycle with as many neighbours as there is room for."""
    for around in range(AROUND, -1, -1):
        columns = sorted({p for q in positions for p in range(max(0, q - around), q + around + 1)})
        if len(columns) <= MAX_COLUMNS:
            break
    return columns[:MAX_COLUMNS]
