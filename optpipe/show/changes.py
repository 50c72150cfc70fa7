"""What two schedules of the same work do differently."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from optpipe.model.arrays import Ints
from optpipe.model.ops import MARKS
from optpipe.show.lanes import Scheduled


class Change(IntEnum):
    """What became of an op."""

    NONE = 0  # it stands in the same order as the others that stayed
    MOVED = 1  # both schedules have it, at another place in its program
    ONLY_HERE = 2  # the other schedule does not have it on this device


def changes(schedule: Scheduled, other: Scheduled) -> Ints:
    """(n,) what distinguishes each op of a schedule from the other: a `Change`.

    Of each device as few ops as possible are called moved: those without which both programs have the same order, which
    is the longest increasing run of their places. Drops and other ops that take no time are left out.
    """
    change = np.zeros(len(schedule.timeline.rows), np.int64)
    for device in range(len(schedule.problem.devices)):
        places = {op: place for place, op in enumerate(_ops(other, device).values())}
        ops = _ops(schedule, device)
        change[[row for row, op in ops.items() if op not in places]] = Change.ONLY_HERE
        common = [row for row, op in ops.items() if op in places]
        kept = _longest_increasing([places[ops[row]] for row in common])
        change[[row for i, row in enumerate(common) if i not in kept]] = Change.MOVED
    return change


def _ops(schedule: Scheduled, device: int) -> dict[int, tuple[int, ...]]:
    """The ops of one program that take time, by row. An absent device has none."""
    rows = schedule.timeline.rows
    of_device = rows.of_device(device)
    lasting = np.flatnonzero(~rows.of_kinds(*MARKS)[of_device]) + of_device.start
    return {row: tuple(op[:4]) for row, op in zip(lasting.tolist(), rows.table[lasting].tolist(), strict=True)}


def _longest_increasing(values: Sequence[int]) -> set[int]:
    """The indices of a longest increasing subsequence (Fredman 1975)."""
    tails: list[int] = []  # the last value of the best run of each length
    ends: list[int] = []  # its index
    before: list[int] = []
    for i, value in enumerate(values):
        length = bisect_left(tails, value)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1], ends[length : length + 1] = [value], [i]
    kept, i = set(), ends[-1] if ends else -1
    while i >= 0:
        kept.add(i)
        i = before[i]
    return kept
