"""Simulated annealing, compiled: ops of one kind and stage change places with others, for some micro-batches in a row
at once, or transfers come and go; and all that begins later is timed anew.

An op is a row of a compiled schedule. Orders are flat: device after device, from `Ops.begins` on.
"""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import compiled, compiled_part
from optpipe.model.arrays import NONE, Floats, Ints
from optpipe_solver.anneal.arrays import Ops, Room

AT_RANDOM = 0.1  # of the moves begin at any op, the others at one that the last op to end waits for
ALONE, EVERYWHERE = 0.35, 0.15  # of the moves concern one pair of ops, or all such pairs
FAR = 0.4  # of the moves take an op beyond several others,
REACH = 3.0  # so many on average
LEAVES = 0.03  # of the moves let a part of an activation leave, or stay, or be recomputed, if any can
LEAD = 4.0  # ops between its reload and its backward at first, on average
LEAP = 2  # times as many places the same move may take an op of another micro-batch
SAME_MS = 1e-9
TRY_OPS = 10  # and all of a device: what a try costs that is not timed, in ops that are


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
    room.after_ms[:] = np.inf
    room.tried[:] = NONE
    room.passing[:] = NONE
    room.present[:] = False
    for d in range(len(ops.memory)):
        room.ends[d] = ops.begins[d]
        while room.ends[d] < ops.begins[d + 1] and order[room.ends[d]] != NONE:
            room.present[order[room.ends[d]]] = True
            room.ends[d] += 1
    waits, all_timed = 0, 0
    for attempt in range(tries + 1):
        changed, behind, since_ms, limit_ms = 0, len(ops.memory), -1.0, np.inf  # at first all is timed
        if attempt > 0:
            b = int(np.random.random() * len(order))
            a, changed, choice = b - 1, ops.device[b], NONE
            parts = ops.choices_begin[changed + 1] - ops.choices_begin[changed]
            if parts > 0 and np.random.random() < LEAVES:
                choice = ops.choices_begin[changed] + int(np.random.random() * parts)
            elif waits > 0 and np.random.random() >= AT_RANDOM:
                wait = int(np.random.random() * waits)
                a, b = room.blocking[wait], room.waits[wait]
                changed = ops.device[order[b]]
            behind = changed + 1
            begin, end = ops.begins[changed], room.ends[changed]
            all_timed += TRY_OPS + end - begin
            if np.random.random() < FAR:
                a -= int(-REACH * np.log(1.0 - np.random.random()))
            room.before[begin : ops.begins[behind]] = order[begin : ops.begins[behind]]
            if choice != NONE:
                first = _leave_or_stay(ops, order, room, choice)
            else:
                first = _move(ops, order, room, max(begin, a), b) if b < end else NONE
            if first == NONE:
                continue
            if not _fits(ops, order, room, changed, attempt):
                _undo(ops, order, room, changed, choice, end)
                continue
            since_ms = room.after_ms[order[first - 1], 0] if first > begin else -1.0
            limit_ms = lengths_ms[0] - hot_ms * np.log(1.0 - np.random.random())
        timed, ms = _time_since(ops, order, room, since_ms, limit_ms, attempt, span)
        all_timed += timed
        if ms > limit_ms or ms == np.inf:
            if attempt == 0:
                raise RuntimeError("the order at hand cannot be run")
            _undo(ops, order, room, changed, choice, end)
            continue
        lengths_ms[0] = ms
        for row in range(len(order)):
            if room.tried[row] == attempt:
                room.start_ms[row] = room.tried_ms[row]
                for stream in range(room.after_ms.shape[1]):
                    room.after_ms[row, stream] = room.tried_after_ms[row, stream]
        for d in range(changed, behind):
            _find_places(ops, order, room, d)
        waits = _critical_waits(ops, order, room, span)
        if ms < lengths_ms[1] - SAME_MS:
            lengths_ms[1] = ms
            best[:] = order
    return all_timed


@compiled_part
def _undo(ops: Ops, order: Ints, room: Room, d: int, choice: int, end: int) -> None:
    """Bring back the order of a device, which ended there, before a move."""
    for place in range(ops.begins[d], ops.begins[d + 1]):
        order[place] = room.before[place]
    room.ends[d] = end
    if choice != NONE:
        for each in range(3):
            row = ops.choices[choice, each]
            if row != NONE:
                room.present[row] = not room.present[row]


@compiled_part
def _leave_or_stay(ops: Ops, order: Ints, room: Room, choice: int) -> int:
    """Let a part of an activation leave that stays, or stay if it leaves, or the like for what is recomputed; returns
    the first place that changes."""
    away, drop, back = ops.choices[choice, 0], ops.choices[choice, 1], ops.choices[choice, 2]
    d = ops.device[back]
    is_away, moves, first, end = room.present[back], away != NONE, NONE, room.ends[d]
    room.present[back] = not is_away
    if moves:
        room.present[away] = room.present[drop] = not is_away
    if is_away:
        for place in range(ops.begins[d], end):
            row = order[place]
            if row in (away, drop, back):
                first = place if first == NONE else first
                room.ends[d] -= 1
            else:
                if not moves and row == ops.needs[back, 0]:  # more is held behind its forward
                    first = place + 1
                order[place - (end - room.ends[d])] = row
        for place in range(room.ends[d], end):
            order[place] = NONE
        return first
    forward, backward = ops.needs[away if moves else back, 0], NONE
    for place in range(ops.begins[d], end):
        if order[place] == forward:
            first = place + 1
        for each in range(1, ops.needs.shape[1]):
            if ops.needs[order[place], each] == back:
                backward = place
    lead = int(-LEAD * np.log(1.0 - np.random.random()))
    back_at = max(first, backward - lead)
    _insert(order, room, end, back_at, back)
    if moves:
        _insert(order, room, end + 1, back_at, drop)
        _insert(order, room, end + 2, first, away)
    room.ends[d] = end + (3 if moves else 1)
    return first if moves else back_at


@compiled_part
def _insert(order: Ints, room: Room, end: int, at: int, row: int) -> None:
    """Insert an op at a place into the order of a device, which ends there."""
    for place in range(end, at, -1):
        order[place] = order[place - 1]
    order[at] = row
    room.start_ms[row] = np.inf
    for stream in range(room.after_ms.shape[1]):
        room.after_ms[row, stream] = np.inf


@compiled_part
def _move(ops: Ops, order: Ints, room: Room, a: int, b: int) -> int:
    """Of the ops at two places of a device, move the first behind the second or the second before the first, and
    likewise the ops of their groups that are as many micro-batches on, for some numbers in a row.

    Returns the first place that changes, or NONE.
    """
    early, late = ops.group[order[a]], ops.group[order[b]]
    i, j = room.number[order[a]], room.number[order[b]]
    if a == b or (early == late and ops.alike[early]):
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
        if sooner:
            _shift(order, y, x)
        else:
            _shift(order, x, y)
        first = x if first == NONE else min(first, x)
    return first


@compiled_part
def _fits(ops: Ops, order: Ints, room: Room, d: int, attempt: int) -> bool:
    """Whether the ops of a device fit in its memory, where drops go before what needs their room, and reloads that have
    none behind the ops after them. Ops that are alike keep their order: they change places."""
    held, end = 0, room.ends[d]
    for place in range(ops.begins[d], end):
        room.passed[ops.group[order[place]]] = 0
    place = ops.begins[d]
    while place < end:
        row = order[place]
        group = ops.group[row]
        if ops.alike[group]:
            row = order[place] = ops.members[group, room.passed[group]]
        if held + ops.takes[row] > ops.memory[d]:
            drop = place + 1
            while drop < end and not _may_drop(ops, order, room, drop, attempt):
                drop += 1
            if drop < end:
                _shift(order, drop, place)
                continue
            later = place
            while later < end and ops.stream[order[later]] > 0:
                later += 1
            if later in (place, end):
                return False
            _shift(order, later, place)
            continue
        room.passed[group] += 1
        room.passing[row] = attempt
        held += ops.takes[row] - ops.frees[row]
        again = ops.again[row]
        if again != NONE and not room.present[again]:
            held += ops.takes[again]
        place += 1
    return True


@compiled_part
def _may_drop(ops: Ops, order: Ints, room: Room, place: int, attempt: int) -> bool:
    """Whether a drop stands there of what has begun to leave before."""
    row = order[place]
    return bool(ops.drops[row]) and room.passing[ops.needs[row, 0]] == attempt


@compiled_part
def _shift(order: Ints, a: int, b: int) -> None:
    """Move the op at a place to another one."""
    row, way = order[a], 1 if a < b else -1
    for place in range(a, b, way):
        order[place] = order[place + way]
    order[b] = row


@compiled_part
def _time_since(
    ops: Ops, order: Ints, room: Room, since_ms: float, limit_ms: float, attempt: int, span: bool
) -> tuple[int, float]:
    """Time the ops that do not start before a moment; those that do have the same places as at hand.

    Returns the number of ops, and the length: infinite where that is above the limit, or ops wait for each other.
    """
    devices, streams = room.free_ms.shape
    timed, to_time = 0, 0
    for d in range(devices):
        low, high = ops.begins[d], room.ends[d]
        to_time += high
        while low < high:
            place = (low + high) // 2
            if _issued_ms(ops, room, order[place]) < since_ms:
                low = place + 1
            else:
                high = place
        to_time -= low
        room.after[d], room.stack[d] = low, d
        for stream in range(streams):
            room.free_ms[d, stream] = room.after_ms[order[low - 1], stream] if low > ops.begins[d] else 0.0
        if room.blocked[d] != NONE:
            room.waiting[room.blocked[d]] = NONE
            room.blocked[d] = NONE
    ready = devices
    while ready > 0:
        ready -= 1
        d = int(room.stack[ready])
        while room.after[d] < room.ends[d]:
            row = order[room.after[d]]
            own = ops.stream[row]
            start_ms = max(room.free_ms[d, own], room.free_ms[d, 0])  # what is not computed is issued behind what is
            for each in range(ops.needs.shape[1]):
                need = ops.needs[row, each]
                if need == NONE or (each > 0 and not room.present[need]):
                    continue
                if room.tried[need] == attempt:
                    end_ms = _end_ms(ops, room.tried_ms, need)
                elif _issued_ms(ops, room, need) < since_ms:
                    end_ms = _end_ms(ops, room.start_ms, need)
                elif ops.device[need] == d:
                    return timed, np.inf
                else:
                    room.waiting[need], room.blocked[d] = d, need
                    break
                start_ms = max(start_ms, end_ms + (ops.delay_ms[row] if each == 0 else 0.0))
            if room.blocked[d] != NONE:
                break
            room.tried_ms[row] = start_ms
            room.free_ms[d, own] = _end_ms(ops, room.tried_ms, row)
            if room.free_ms[d, own] > limit_ms and not span:
                return timed, np.inf
            for stream in range(streams):
                room.tried_after_ms[row, stream] = room.free_ms[d, stream]
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
        begin_ms = _begin_ms(ops, order, room, d, attempt, span)
        for stream in range(streams):
            longest_ms = max(longest_ms, room.free_ms[d, stream] - begin_ms)
    return timed, longest_ms


@compiled_part
def _issued_ms(ops: Ops, room: Room, row: int) -> float:
    """When an op that computes starts, or when another one is issued: never sooner for what stands later."""
    return float(room.start_ms[row] if ops.stream[row] == 0 else room.after_ms[row, 0])


@compiled_part
def _end_ms(ops: Ops, start_ms: Floats, row: int) -> float:
    return float(start_ms[row] + ops.ms[row])


@compiled_part
def _begin_ms(ops: Ops, order: Ints, room: Room, d: int, attempt: int, span: bool) -> float:
    """When a device's time begins to count."""
    if not span or ops.begins[d] == room.ends[d]:
        return 0.0
    row = order[ops.begins[d]]
    return float(room.tried_ms[row] if room.tried[row] == attempt else room.start_ms[row])


@compiled_part
def _find_places(ops: Ops, order: Ints, room: Room, d: int) -> None:
    for place in range(ops.begins[d], room.ends[d]):
        room.counts[ops.group[order[place]]] = 0
    for place in range(ops.begins[d], room.ends[d]):
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
        begin_ms = _begin_ms(ops, order, room, d, NONE, span)
        for place in range(room.ends[d] - 1, ops.begins[d] - 1, -1):
            ms = _end_ms(ops, room.start_ms, order[place]) - begin_ms
            if ms > longest_ms:
                row, longest_ms = order[place], ms
            if ops.stream[order[place]] == 0:
                break
    count = 0
    for _ in range(len(order)):
        if row == NONE:
            break
        waiting, row = row, NONE
        start_ms = room.start_ms[waiting] - SAME_MS
        place = room.places[ops.group[waiting], room.number[waiting]]
        before = _held_up_by(ops, order, room, place, start_ms)
        if before != NONE:
            row = order[before]
            if ops.needs[waiting, 0] != row:  # else neither can come first
                room.waits[count], room.blocking[count] = place, before
                count += 1
            continue
        for each in range(ops.needs.shape[1]):
            need = ops.needs[waiting, each]
            delay_ms = ops.delay_ms[waiting] if each == 0 else 0.0
            if need != NONE and room.present[need] and _end_ms(ops, room.start_ms, need) + delay_ms >= start_ms:
                row = need
    return count


@compiled_part
def _held_up_by(ops: Ops, order: Ints, room: Room, place: int, start_ms: float) -> int:
    """The place of the op before one in its program that ends no sooner than that begins, on its stream or where it is
    issued; NONE if there is none."""
    begin = ops.begins[ops.device[order[place]]]
    for stream in (0, ops.stream[order[place]]):
        if place > begin and room.after_ms[order[place - 1], stream] >= start_ms:
            for before in range(place - 1, begin - 1, -1):
                if ops.stream[order[before]] == stream:
                    return before
    return NONE
