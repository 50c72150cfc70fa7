"""Why a schedule cannot run: the ops that wait for each other in a circle, shown on the device-by-position grid."""

from __future__ import annotations

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.evaluate.graph import Needs, Streams
from optpipe.evaluate.rows import Rows
from optpipe.model.arrays import Flags
from optpipe.model.ops import Op, Pair
from optpipe.model.program import JOINED

AROUND = 6  # positions shown before and after the ops on the cycle, fewer where there are many
MAX_COLUMNS = 28  # positions shown
MAX_ROWS = 16  # devices shown
MAX_WAITS = 40  # ops named in the sentence


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
    columns = _columns({row - first_row[int(device[row])] for row in cycle if int(device[row]) in shown})
    marked = {*cycle, *(row + 1 for row in cycle if rows.table[row, JOINED])}
    lines = []
    for d in shown:
        cells = []
        for p in columns:
            row = first_row[d] + p
            text = str(rows.op(row)) if row < len(rows) and device[row] == d else ""
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
