"""Simulated annealing, compiled: ops of one kind and stage change places with others, for some micro-batches in a row
at once, and all that begins later is timed anew.

An op is a row of a compiled schedule. Orders are flat: device after device, from `Ops.begins` on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.graph import ACROSS, OWN, RESTORED
from optpipe.evaluate.jit import compiled, compiled_part
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.schedule import Schedule

AT_RANDOM = 0.1  # of the moves begin at any op, the others at one that the last op to end waits for
ALONE, EVERYWHERE = 0.35, 0.15  # of the moves concern one pair of ops, or all such pairs
FAR = 0.4  # of the moves take an op beyond several others,
REACH = 3.0  # so many on average
LEAP = 2  # times as many places the same move may take an op of another micro-batch
SAME_MS = 1e-9
TRY_OPS = 10  # and all of a device: what a try costs that is not timed, in ops that are


class Ops(NamedTuple):
    """The ops of a schedule, and what does not change when they change places."""

    begins: Ints  # (D + 1,) where each device's ops begin in an order, and the number of all ops
    device: Ints  # (n,)
    group: Ints  # (n,) of one kind and stage
    members: Ints  # (groups, most) the ops of each group, then NONE
    ms: Floats  # (n,)
    needs: Ints  # (n, 2) the ops that must have ended, or NONE
    delay_ms: Floats  # (n, 2) how long ago
    takes: Ints  # (n,) bytes, at its start
    frees: Ints  # (n,) bytes, at its end
    memory: Ints  # (D,) bytes
    alike: bool  # whether the ops of a group are equal: they keep their order


class Room(NamedTuple):
    """Where a search is; of rejected orders only `tried_ms` and `tried` say something."""

    start_ms: Floats  # (n,)
    tried_ms: Floats  # (n,) starts by the order that is tried
    tried: Ints  # (n,) the try that has timed each op last
    waiting: Ints  # (n,) the device that waits for each op, or NONE
    blocked: Ints  # (D,) the op that each device waits for, or NONE
    after: Ints  # (D,) the next place on each device
    free_ms: Floats  # (D,)
    stack: Ints  # (D,) devices that may go on
    places: Ints  # (groups, most) of each group's ops
    counts: Ints  # (groups,)
    passed: Ints  # (groups,) ops of each group before a place
    number: Ints  # (n,) of each op within its group
    before: Ints  # (n,) the order of a device before a move
    waits: Ints  # (n,) places of ops that the last one to end waits for, each because of the op before it


def ops_of(schedule: Schedule) -> Ops:
    """Read a schedule in which all ops compute, one at a time."""
    compiled_schedule, problem = schedule.compiled, schedule.problem
    rows, (waits, delays), effects = compiled_schedule.rows, compiled_schedule.waits, compiled_schedule.effects
    across = waits[:, ACROSS] != NONE  # a backward that waits for another one need not wait for its forward
    needs = np.column_stack([np.where(across, waits[:, ACROSS], waits[:, OWN]), waits[:, RESTORED]])
    _, group = np.unique(rows.kind * len(problem.stages) + rows.stage, return_inverse=True)
    counts = np.bincount(group)
    members = np.full((len(counts), counts.max()), NONE)
    for each, count in enumerate(counts.tolist()):
        members[each, :count] = np.flatnonzero(group == each)
    return Ops(
        begins=np.searchsorted(rows.device, np.arange(len(problem.devices) + 1)),
        device=rows.device,
        group=group.reshape(-1),
        members=members,
        ms=compiled_schedule.durations_ms,
        needs=needs,
        delay_ms=np.column_stack([np.where(across, delays[:, ACROSS], 0.0), delays[:, RESTORED]]),
        takes=effects.takes,
        frees=effects.frees,
        memory=problem.costs.activation_budget,
        alike=bool(problem.costs.are_equal and not rows.of_kinds(Kind.C).any()),
    )


def new_room(ops: Ops) -> Room:
    """Return room for a search."""
    n, devices, groups = len(ops.ms), len(ops.memory), len(ops.members)
    of_ops = {name: np.full(n, NONE) for name in ("tried", "waiting", "number", "before", "waits")}
    of_devices = {name: np.full(devices, NONE) for name in ("blocked", "after", "stack")}
    of_groups = {name: np.full(groups, 0) for name in ("counts", "passed")}
    return Room(
        start_ms=np.zeros(n),
        tried_ms=np.zeros(n),
        free_ms=np.zeros(devices),
        places=ops.members.copy(),
        **of_ops,
        **of_devices,
        **of_groups,
    )


@compiled
def anneal(
    ops: Ops, order: Ints, best: Ints, room: Room, lengths_ms: Floats, hot_ms: float, tries: int, span: bool, seed: int
) -> int:
    """Try moves; returns the number of ops that were timed, and that tries cost beside.

    Parameters
    ----------
    order, best
        (n,) the order at hand and the best one; both are changed.
    lengths_ms
        (2,) how long they take; becomes so.
    hot_ms
        What the next order may take more than the one at hand, on average (Kirkpatrick, Gelatt and Vecchi 1983).
    span
        Whether the length is the longest span of a device.
    """
    np.random.seed(seed)
    room.start_ms[:] = np.inf
    room.tried[:] = NONE
    waits, all_timed = 0, 0
    for attempt in range(tries + 1):
        changed, behind, since_ms, limit_ms = 0, len(ops.memory), -1.0, np.inf  # at first all is timed
        if attempt > 0:
            b = int(np.random.random() * len(order))
            if waits > 0 and np.random.random() >= AT_RANDOM:
                b = room.waits[int(np.random.random() * waits)]
            changed = ops.device[order[b]]
            behind = changed + 1
            begin, end = ops.begins[changed], ops.begins[behind]
            all_timed += TRY_OPS + end - begin
            back = 1 if np.random.random() >= FAR else 1 + int(-REACH * np.log(1.0 - np.random.random()))
            room.before[begin:end] = order[begin:end]
            first = _move(ops, order, room, max(begin, b - back), b)
            if first == NONE:
                continue
            if not _fits(ops, order, room, changed):
                order[begin:end] = room.before[begin:end]
                continue
            since_ms = _end_ms(ops, room.start_ms, order[first - 1]) if first > begin else -1.0
            limit_ms = lengths_ms[0] - hot_ms * np.log(1.0 - np.random.random())
        timed, ms = _time_since(ops, order, room, since_ms, limit_ms, attempt, span)
        all_timed += timed
        if ms > limit_ms or ms == np.inf:
            if attempt == 0:
                return all_timed
            order[begin:end] = room.before[begin:end]
            continue
        lengths_ms[0] = ms
        for row in range(len(order)):
            if room.tried[row] == attempt:
                room.start_ms[row] = room.tried_ms[row]
        for d in range(changed, behind):
            _find_places(ops, order, room, d)
        waits = _critical_waits(ops, order, room, span)
        if ms < lengths_ms[1] - SAME_MS:
            lengths_ms[1] = ms
            best[:] = order
    return all_timed


@compiled_part
def _move(ops: Ops, order: Ints, room: Room, a: int, b: int) -> int:
    """Of the ops at two places of a device, move the first behind the second or the second before the first, and
    likewise the ops of their groups that are as many micro-batches on, for some numbers in a row.

    Returns the first place that changes, or NONE.
    """
    early, late = ops.group[order[a]], ops.group[order[b]]
    i, j = room.number[order[a]], room.number[order[b]]
    if a == b or (early == late and ops.alike):
        return NONE
    first, least, most = NONE, 0, 0
    share, sooner = np.random.random(), np.random.random() < 0.5
    if share >= ALONE and early != late:
        most = room.counts[early] + room.counts[late]
        least = -most
        if share >= ALONE + EVERYWHERE:
            size = -np.log(1.0 - np.random.random()) * room.counts[early] / 4.0
            least = -int(size * np.random.random())
            most = least + int(size)
    for step in range(max(least, -i, -j), min(most, room.counts[early] - 1 - i, room.counts[late] - 1 - j) + 1):
        x, y = room.places[early, i + step], room.places[late, j + step]
        # Moves of other micro-batches may have changed these places.
        if x >= y or y - x > LEAP * (b - a + 1) or ops.group[order[x]] != early or ops.group[order[y]] != late:
            continue
        moved = order[y] if sooner else order[x]
        if sooner:
            for place in range(y, x, -1):
                order[place] = order[place - 1]
            order[x] = moved
        else:
            for place in range(x, y):
                order[place] = order[place + 1]
            order[y] = moved
        first = x if first == NONE else min(first, x)
    return first


@compiled_part
def _fits(ops: Ops, order: Ints, room: Room, d: int) -> bool:
    """Whether the ops of a device fit in its memory. Those that are alike keep their order: they change places."""
    held = 0
    for place in range(ops.begins[d], ops.begins[d + 1]):
        room.passed[ops.group[order[place]]] = 0
    for place in range(ops.begins[d], ops.begins[d + 1]):
        row = order[place]
        if ops.alike:
            row = order[place] = ops.members[ops.group[row], room.passed[ops.group[row]]]
            room.passed[ops.group[row]] += 1
        held += ops.takes[row]
        if held > ops.memory[d]:
            return False
        held -= ops.frees[row]
    return True


@compiled_part
def _time_since(
    ops: Ops, order: Ints, room: Room, since_ms: float, limit_ms: float, attempt: int, span: bool
) -> tuple[int, float]:
    """Time the ops that do not start before a moment; those that do have the same places as at hand.

    Returns the number of ops, and the length: infinite where that is above the limit, or ops wait for each other.
    """
    devices, timed, to_time = len(ops.memory), 0, len(order)
    for d in range(devices):
        low, high = ops.begins[d], ops.begins[d + 1]
        to_time += low
        while low < high:
            place = (low + high) // 2
            if room.start_ms[order[place]] < since_ms:
                low = place + 1
            else:
                high = place
        to_time -= low
        room.after[d], room.stack[d] = low, d
        room.free_ms[d] = _end_ms(ops, room.start_ms, order[low - 1]) if low > ops.begins[d] else 0.0
        if room.blocked[d] != NONE:
            room.waiting[room.blocked[d]] = NONE
            room.blocked[d] = NONE
    ready = devices
    while ready > 0:
        ready -= 1
        d = room.stack[ready]
        while room.after[d] < ops.begins[d + 1]:
            row = order[room.after[d]]
            start_ms = room.free_ms[d]
            for each in range(2):
                need = ops.needs[row, each]
                if need == NONE:
                    continue
                if room.tried[need] == attempt:
                    end_ms = _end_ms(ops, room.tried_ms, need)
                elif room.start_ms[need] < since_ms:
                    end_ms = _end_ms(ops, room.start_ms, need)
                elif ops.device[need] == d:
                    return timed, np.inf
                else:
                    room.waiting[need], room.blocked[d] = d, need
                    break
                start_ms = max(start_ms, end_ms + ops.delay_ms[row, each])
            if room.blocked[d] != NONE:
                break
            room.tried_ms[row] = start_ms
            room.free_ms[d] = _end_ms(ops, room.tried_ms, row)
            if room.free_ms[d] > limit_ms and not span:
                return timed, np.inf
            room.tried[row] = attempt
            room.after[d] += 1
            timed += 1
            if room.waiting[row] != NONE:
                other = room.waiting[row]
                room.waiting[row], room.blocked[other] = NONE, NONE
                room.stack[ready] = other
                ready += 1
    if timed < to_time:
        return timed, np.inf
    longest_ms = 0.0
    for d in range(devices):
        longest_ms = max(longest_ms, room.free_ms[d] - _begin_ms(ops, order, room, d, attempt, span))
    return timed, longest_ms


@compiled_part
def _end_ms(ops: Ops, start_ms: Floats, row: int) -> float:
    return float(start_ms[row] + ops.ms[row])


@compiled_part
def _begin_ms(ops: Ops, order: Ints, room: Room, d: int, attempt: int, span: bool) -> float:
    """When a device's time begins to count."""
    if not span or ops.begins[d] == ops.begins[d + 1]:
        return 0.0
    row = order[ops.begins[d]]
    return float(room.tried_ms[row] if room.tried[row] == attempt else room.start_ms[row])


@compiled_part
def _find_places(ops: Ops, order: Ints, room: Room, d: int) -> None:
    for place in range(ops.begins[d], ops.begins[d + 1]):
        room.counts[ops.group[order[place]]] = 0
    for place in range(ops.begins[d], ops.begins[d + 1]):
        row = order[place]
        group = ops.group[row]
        room.number[row] = room.counts[group]
        room.places[group, room.number[row]] = place
        room.counts[group] += 1


@compiled_part
def _critical_waits(ops: Ops, order: Ints, room: Room, span: bool) -> int:
    """Find the places for `Room.waits`, from the last op to end backwards; returns how many."""
    row, longest_ms = NONE, -1.0
    for d in range(len(ops.memory)):
        if ops.begins[d] < ops.begins[d + 1]:
            ms = _end_ms(ops, room.start_ms, order[ops.begins[d + 1] - 1])
            ms -= _begin_ms(ops, order, room, d, NONE, span)
            if ms > longest_ms:
                row, longest_ms = order[ops.begins[d + 1] - 1], ms
    count = 0
    while row != NONE:
        place, start_ms = room.places[ops.group[row], room.number[row]], room.start_ms[row] - SAME_MS
        row_before = order[place - 1]
        if place > ops.begins[ops.device[row]] and _end_ms(ops, room.start_ms, row_before) >= start_ms:
            room.waits[count] = place
            count += 1
            row = row_before
            continue
        waiting, row = row, NONE
        for each in range(2):
            need = ops.needs[waiting, each]
            if need != NONE and _end_ms(ops, room.start_ms, need) + ops.delay_ms[waiting, each] >= start_ms:
                row = need
    return count
