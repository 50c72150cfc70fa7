"""The states of a best-first search: a heap orders them by their bounds, a hash table finds those that may dominate.

A state inherits the bound of the one before it where its own is lower. That does not count when one dominates another:
what was inherited is at most a bound that was taken already.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part
from optpipe.model.arrays import Flags, Floats, Ints

MOST_CELLS = 2**25  # numbers in all states together
BUCKETS = 2**20
NOW = 0  # the first column of every state: the time
# Columns of `tally`
ROWS, CELLS, HEAPED, IS_COMPLETE, IS_FULL = range(5)


class States(NamedTuple):
    """The states that a search has kept, a row each."""

    cells: Floats  # the columns of all rows, one row after the other; a row has as many as it uses
    begin: Ints  # (rows,) the first cell of each row
    bound: Floats  # (rows,) ms: no schedule that begins like this ends before
    next_in_bucket: Ints  # (rows,) the next row with the same hash, then -1
    bucket: Ints  # (buckets,) the newest row with this hash, or -1
    heap: Ints  # (rows,) a binary heap of row numbers, the least bound on top
    # Mask of the columns that must be equal for one state to dominate another; the others must be at most as large.
    must_equal: Flags
    # The numbers of rows, of cells and of rows on the heap; whether the best state is a complete schedule; whether a
    # state had no room.
    tally: Ints


def first_states(rows: int, must_equal: Flags, columns: int) -> States:
    """Room for so many states, and the one in which nothing has been done: so many columns of 0. Memory is used as it
    is filled."""
    begin, next_in_bucket, heap = (np.empty(rows, dtype=np.int64) for _ in range(3))
    bucket, tally = np.full(BUCKETS, -1, dtype=np.int64), np.array([1, columns, 1, 0, 0])  # in no bucket
    cells, bound = np.empty(MOST_CELLS), np.empty(rows)
    cells[:columns] = begin[0] = bound[0] = heap[0] = 0
    return States(cells, begin, bound, next_in_bucket, bucket, heap, must_equal, tally)


@compiled_part
def copy_columns(source: Floats, target: Floats) -> None:
    for at in range(len(source)):
        target[at] = source[at]


@compiled_part
def least_bound(states: States) -> float:
    """The least bound of all states that are still to be taken; infinite if there are none."""
    return float(states.bound[states.heap[0]]) if states.tally[HEAPED] else np.inf


@compiled_part
def read_best(states: States, columns: Floats) -> float:
    """Fill the columns with the state of the least bound, and return that bound. Columns it does not use become 0."""
    row = states.heap[0]
    begin = states.begin[row]
    end = states.begin[row + 1] if row + 1 < states.tally[ROWS] else states.tally[CELLS]
    for at in range(len(columns)):
        columns[at] = states.cells[begin + at] if begin + at < end else 0.0
    return float(states.bound[row])


@compiled_part
def remove_best(states: States) -> None:
    """Take the state of the least bound off the heap. It stays in the table, where it can dominate others."""
    heap, tally = states.heap, states.tally
    tally[HEAPED] -= 1
    last, at = heap[tally[HEAPED]], 0
    while True:
        child = 2 * at + 1
        if child >= tally[HEAPED]:
            break
        if child + 1 < tally[HEAPED] and _comes_first(heap[child + 1], heap[child], states):
            child += 1
        if not _comes_first(heap[child], last, states):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last


@compiled_part
def add_unless_dominated(columns: Floats, width: int, only_waited: bool, bound: float, states: States) -> None:
    """Keep a state, of which `width` columns are used, unless another one dominates it.

    What the dominated state can do later, the other can do, too, after waiting. Two states must not dominate each other
    by waiting in turns, so a state that only waited is left out only for another one at the same time.
    """
    code = 0
    for at in range(width):
        if states.must_equal[at]:
            code = (code * 31 + int(columns[at]) + 2) % 1_000_000_007
    code %= len(states.bucket)
    other = states.bucket[code]
    while other >= 0:
        if _dominates(other, columns, width, only_waited, states):
            return
        other = states.next_in_bucket[other]
    tally = states.tally
    row, begin = tally[ROWS], tally[CELLS]
    if row == len(states.begin) or begin + width > len(states.cells):
        tally[IS_FULL] = 1
        return
    states.begin[row], states.bound[row] = begin, bound
    for at in range(width):
        states.cells[begin + at] = columns[at]
    states.next_in_bucket[row], states.bucket[code] = states.bucket[code], row
    tally[ROWS] += 1
    tally[CELLS] += width
    _put_on_heap(row, states)


@compiled_part
def _dominates(other: int, columns: Floats, width: int, only_waited: bool, states: States) -> bool:
    """Whether a row dominates these columns. Rows of another width differ in an earlier column that must be equal."""
    cells, begin, must_equal = states.cells, states.begin[other], states.must_equal
    for at in range(width):
        if cells[begin + at] > columns[at] or (must_equal[at] and cells[begin + at] != columns[at]):
            return False
    return not only_waited or cells[begin + NOW] == columns[NOW]


@compiled_part
def _put_on_heap(row: int, states: States) -> None:
    heap, at = states.heap, states.tally[HEAPED]
    states.tally[HEAPED] += 1
    while at:
        parent = (at - 1) // 2
        if not _comes_first(row, heap[parent], states):
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = row


@compiled_part
def _comes_first(a: int, b: int, states: States) -> bool:
    """Whether row a is taken before row b: by the least bound, then by the latest time."""
    bound, cells, begin = states.bound, states.cells, states.begin
    return bool(bound[a] < bound[b] or (bound[a] == bound[b] and cells[begin[a] + NOW] > cells[begin[b] + NOW]))
