"""The states that a search has kept: a heap, and a table by what has to be alike for one to stand for another."""

from __future__ import annotations

from optpipe.evaluate.jit import compiled
from optpipe.model.arrays import Floats
from optpipe_solver.relax.layout import CELLS, FULL, LENGTH, NOW, ROWS, Known


@compiled
def _no_later(other: int, row: Floats, width: int, waited: bool, known: Known) -> bool:
    """Whether a row is no later. Rows of another width differ in an earlier column that must be alike."""
    cells, first, same = known.cells, known.begin[other], known.same
    for at in range(width):
        if cells[first + at] > row[at] or (same[at] and cells[first + at] != row[at]):
            return False
    return not waited or cells[first + NOW] == row[NOW]


@compiled
def _before(a: int, b: int, known: Known) -> bool:
    """The least end first, of equals the farthest on."""
    bound, cells, begin = known.bound, known.cells, known.begin
    return bool(bound[a] < bound[b] or (bound[a] == bound[b] and cells[begin[a] + NOW] > cells[begin[b] + NOW]))


@compiled
def read(row: int, columns: Floats, known: Known) -> None:
    """Fill the columns with a row; those that it does not use are 0."""
    first = known.begin[row]
    behind = known.begin[row + 1] if row + 1 < known.tally[ROWS] else known.tally[CELLS]
    columns[: behind - first] = known.cells[first:behind]
    columns[behind - first :] = 0.0


@compiled
def take(known: Known) -> None:
    """Take the first row off the heap."""
    heap, count = known.heap, known.tally
    count[LENGTH] -= 1
    last, at = heap[count[LENGTH]], 0
    while True:
        below = 2 * at + 1
        if below >= count[LENGTH]:
            break
        if below + 1 < count[LENGTH] and _before(heap[below + 1], heap[below], known):
            below += 1
        if not _before(heap[below], last, known):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last


@compiled
def add(row: Floats, width: int, waited: bool, end: float, known: Known) -> None:
    """Keep a state, whose columns from `width` on are of no use, unless another one is as far and later in nothing.

    What that one can do later it does after waiting. So that two states do not stand for each other's waiting, one
    that only waited is left out only for another one at the same time.
    """
    table, heap, count = known.table, known.heap, known.tally
    code = 0
    for at in range(width):
        if known.same[at]:
            code = (code * 31 + int(row[at]) + 2) % 1_000_000_007
    code %= len(table)
    other = table[code]
    while other >= 0:
        if _no_later(other, row, width, waited, known):
            return
        other = known.chain[other]
    new = count[ROWS]
    if new == len(known.begin) or count[CELLS] + width > len(known.cells):
        count[FULL] = 1
        return
    known.begin[new], known.bound[new] = count[CELLS], end
    known.cells[count[CELLS] : count[CELLS] + width] = row[:width]
    count[CELLS] += width
    known.chain[new], table[code] = table[code], new
    count[ROWS] += 1
    at = count[LENGTH]
    count[LENGTH] += 1
    while at:
        above = heap[(at - 1) // 2]
        if not _before(new, above, known):
            break
        heap[at] = above
        at = (at - 1) // 2
    heap[at] = new
