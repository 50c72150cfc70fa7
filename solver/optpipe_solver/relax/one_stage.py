"""Best-first search over what one device can do, on plain arrays so that it can be compiled."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import compiled
from optpipe.model.arrays import Flags, Floats
from optpipe_solver.relax.known import add, read, take
from optpipe_solver.relax.layout import (
    AGAIN,
    BACK,
    BACKWARD,
    CHECKPOINT,
    COMING,
    DONE,
    FIRST,
    FORWARD,
    FULL,
    IDLE,
    LENGTH,
    LEVEL,
    LINE,
    MOST_VISITS,
    NOW,
    OUT,
    QUEUE,
    ROWS,
    RUNS,
    STARTED,
    TAKEN,
    UNTIL,
    VISITS,
    WAITING,
    WEIGHT,
    Known,
    OneStage,
)


def same(m: int) -> Flags:
    """(columns,) whether one is alike in two states of which one stands for the other; in the others it is no later."""
    found = np.zeros(FIRST + 3 * min(m, MOST_VISITS), dtype=bool)
    found[[RUNS, STARTED, LINE + 1, LINE + 2, LINE + 4, LINE + 5, VISITS]] = True
    found[FIRST + 1 :: 3] = True
    return found


@compiled
def _moves(row: Floats, i: int) -> bool:
    """Whether a part of an activation is on its way."""
    return bool((row[LINE + 1] != IDLE and row[LINE + 2] == i) or (row[LINE + 4] != IDLE and row[LINE + 5] == i))


@compiled
def _used(row: Floats, device: OneStage) -> int:
    """The bytes that are held now. None is free before the op that runs has ended."""
    if row[RUNS] != IDLE:
        return int(row[LEVEL])
    size, present = device.size, device.present
    used, held = 0, int(row[VISITS])
    for i in range(held):
        k = row[FIRST + 3 * i + 1]
        used += size[4] if k == CHECKPOINT else present[int(k)]
    used += int(row[WAITING]) * size[5]
    for line in range(2):
        if row[LINE + 3 * line + 1] == BACK:
            k = int(row[FIRST + 3 * int(row[LINE + 3 * line + 2]) + 1])
            used += present[k + 1] - present[k]
    return int(used)


@compiled
def _compute(row: Floats, choice: int, device: OneStage, used: int) -> int:
    """Start an op, if that may be; returns the bytes that are held then, or -1."""
    ms, rules, size, present = device.ms, device.rules, device.size, device.present
    n, held, now = len(present) - 1, int(row[VISITS]), row[NOW]
    if choice == 0:
        return used
    if row[RUNS] != IDLE:
        return -1
    if choice == 5:
        if row[WAITING] == 0.0:
            return -1
        used += size[6] - size[5]
        row[UNTIL], row[RUNS], row[LEVEL] = now + ms[2], WEIGHT, used
        row[WAITING] -= 1.0
        return used if used <= size[0] else -1
    if choice <= 2:
        if row[STARTED] == rules[0] or (choice == 2 and not rules[2]):
            return -1
        row[UNTIL], row[RUNS] = now + ms[0], FORWARD
        row[STARTED] += 1.0
        row[FIRST + 3 * held] = row[UNTIL] + ms[6]
        for q in range(len(device.queues)):
            row[QUEUE + q] = max(row[QUEUE + q] + device.queues[q, 1], row[UNTIL] + device.queues[q, 0])
            row[FIRST + 3 * held + 2] = max(row[FIRST + 3 * held + 2], row[QUEUE + q])
        row[FIRST + 3 * held + 1] = n if choice == 1 else CHECKPOINT
        row[VISITS] += 1.0
        used += size[1]
        row[LEVEL] = used
        return used if used <= size[0] else -1
    is_turn = row[FIRST + 2] <= now
    for i in range(held):
        at = FIRST + 3 * i
        if choice == 4 and row[at + 1] == CHECKPOINT:
            row[UNTIL], row[RUNS], row[at + 1] = now + ms[3], AGAIN, COMING
            used += size[2] - size[4]
            row[LEVEL] = used
            return used if used <= size[0] else -1
        if choice == 3 and is_turn and row[at + 1] == n and row[at] <= now and not _moves(row, i):
            row[UNTIL], row[RUNS] = now + ms[1], BACKWARD
            for j in range(held - 1):
                here = FIRST + 3 * j
                if j >= i:
                    row[here : here + 2] = row[here + 3 : here + 5]
                row[here + 2] = row[here + 5]
            row[FIRST + 3 * held - 3 : FIRST + 3 * held] = 0.0
            row[VISITS] -= 1.0
            for whose in (LINE + 2, LINE + 5):
                if row[whose - 1] != IDLE and row[whose] > i:
                    row[whose] -= 1.0
            used += size[3] - present[n]
            row[LEVEL] = used
            return used if used <= size[0] else -1
    return -1


@compiled
def _carry(row: Floats, line: int, way: int, device: OneStage, used: int) -> int:
    """Let a line carry a part, if that may be; returns the bytes that are held then, or -1."""
    ms, present, lines = device.ms, device.present, device.rules[1]
    n, at, i, out = len(present) - 1, LINE + 3 * line, (way - 1) // 2, (way - 1) % 2 == 0
    if row[at + 1] != IDLE or (lines == 2 and out != (line == 0)):
        return -1
    k, visits = row[FIRST + 3 * i + 1], int(row[VISITS])
    fresh = visits - 1 if row[RUNS] == FORWARD else visits  # its forward runs
    if k < (1.0 if out else 0.0) or (not out and k == n) or i == fresh:
        return -1
    # Another one with as many parts comes first: the last one to leave, the first one to come back.
    begin, end = (i + 1, visits) if out else (0, i)
    if not _moves(row, i):
        for j in range(begin, end):
            if row[FIRST + 3 * j + 1] == k and j != fresh and not _moves(row, j):
                return -1
    if not out:
        used += present[int(k) + 1] - present[int(k)]
    if row[RUNS] != IDLE:
        row[LEVEL] = used
    row[at], row[at + 1], row[at + 2] = row[NOW] + (ms[4] if out else ms[5]), OUT if out else BACK, i
    return used if used <= device.size[0] else -1


@compiled
def _advance(row: Floats, device: OneStage) -> bool:
    """Go to the next event. False if there is none."""
    ms, n = device.ms, len(device.present) - 1
    now, visits = row[NOW], int(row[VISITS])
    event = np.inf
    if row[RUNS] != IDLE:
        event = row[UNTIL]
    else:
        for i in range(visits):
            if row[FIRST + 3 * i] > now:
                event = min(event, row[FIRST + 3 * i])
        if visits and row[FIRST + 2] > now:
            event = min(event, row[FIRST + 2])
    for line in range(2):
        if row[LINE + 3 * line + 1] != IDLE:
            event = min(event, row[LINE + 3 * line])
    if event == np.inf:
        return False
    if row[RUNS] != IDLE and row[UNTIL] <= event:
        if row[RUNS] == BACKWARD:
            row[WAITING] += ms[2] > 0.0
        elif row[RUNS] == AGAIN:
            for i in range(visits):
                if row[FIRST + 3 * i + 1] == COMING:
                    row[FIRST + 3 * i + 1] = n
        row[UNTIL], row[RUNS], row[LEVEL] = 0.0, IDLE, 0.0
    for at in (LINE, LINE + 3):
        if row[at + 1] != IDLE and row[at] <= event:
            row[FIRST + 3 * int(row[at + 2]) + 1] += 1.0 if row[at + 1] == BACK else -1.0
            row[at : at + 3] = 0.0
    row[NOW] = event
    for i in range(visits):
        row[FIRST + 3 * i] = max(row[FIRST + 3 * i], event)
        row[FIRST + 3 * i + 2] = max(row[FIRST + 3 * i + 2], event)
    for q in range(len(device.queues)):  # who passes it next comes from a forward that is still to begin
        passes, lasts = device.queues[q]
        row[QUEUE + q] = max(row[QUEUE + q], event + ms[0] + passes - lasts) if row[STARTED] < device.rules[0] else 0.0
    # Of those that are ready alike, by parts.
    for i in range(1, visits):
        j = i
        while j and row[FIRST + 3 * j] == row[FIRST + 3 * j - 3] and row[FIRST + 3 * j + 1] > row[FIRST + 3 * j - 2]:
            if row[RUNS] == FORWARD and j == visits - 1:
                break
            a, b = FIRST + 3 * j - 2, FIRST + 3 * j + 1
            row[a], row[b] = row[b], row[a]
            for whose in (LINE + 2, LINE + 5):
                if row[whose - 1] != IDLE:
                    if row[whose] == j:
                        row[whose] = j - 1
                    elif row[whose] == j - 1:
                        row[whose] = j
            j -= 1
    return True


@compiled
def _least_end(row: Floats, device: OneStage) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way back, by link and memory."""
    ms, rules, shares, worth, less = device.ms, device.rules, device.shares, device.worth, device.less
    n = len(device.present) - 1
    now, visits, coming = row[NOW], int(row[VISITS]), rules[0] - row[STARTED]
    left = coming + visits  # activations before their input gradient
    rest = max(0.0, row[UNTIL] - now) if row[RUNS] != IDLE else 0.0
    again = 0.0
    back = 0.0  # parts that are to come back
    whole = coming  # activations of which all parts can still leave
    path = now + rest + ms[7] if row[RUNS] == BACKWARD else now
    if coming:
        path = now + rest + coming * ms[0] + ms[6] + ms[1] + ms[7]
        for q in range(len(device.queues)):
            passes, lasts = device.queues[q]
            last = max(row[QUEUE + q] + lasts, now + rest + ms[0] + passes) + (coming - 1.0) * lasts
            path = max(path, last + ms[1] + ms[7])
    for i in range(visits):
        k = row[FIRST + 3 * i + 1]
        path = max(path, max(row[FIRST + 3 * i], row[FIRST + 3 * i + 2]) + ms[1] + ms[7])
        if k == CHECKPOINT:
            again += ms[3]
        elif k >= 0.0:
            back += n - k
            whole += k == n
    link_out = link_back = 0.0
    for line in range(2):
        at = LINE + 3 * line
        if row[at + 1] != IDLE:
            if row[at + 1] == OUT:
                link_out += row[at] - now
                back += 1.0
            else:
                link_back += row[at] - now
                back -= 1.0
    link_back += back * ms[5]
    gradients = (left + row[WAITING]) * ms[2] + (ms[2] if row[RUNS] == BACKWARD else 0.0)
    inputs = coming * ms[0] + left * ms[1] + again + rest
    end = max(path, now + inputs + gradients)
    if left:
        end = max(end, now + inputs + ms[7])
    if left == 0.0:
        return float(end)
    for f in range(len(shares)):
        area = coming * (ms[0] * shares[f, 0] + ms[6] * worth[f, n]) + left * ms[1] * shares[f, 2]
        area += gradients * shares[f, 3]
        if row[RUNS] == BACKWARD:
            area += rest * shares[f, 2]
        elif row[RUNS] == WEIGHT:
            area += rest * shares[f, 3]
        for i in range(visits):
            k = row[FIRST + 3 * i + 1]
            wait = row[FIRST + 3 * i] - now
            if row[RUNS] == FORWARD and i == visits - 1:
                area += rest * shares[f, 0]
                wait -= rest
            if k == n and not _moves(row, i):
                area += wait * worth[f, n]
            elif k >= 0.0:
                first = int(k)  # parts that it may be left with, but for one that is coming back
                for line in range(2):
                    at = LINE + 3 * line
                    if row[at + 1] != IDLE and row[at + 2] == i:
                        first += 1 if row[at + 1] == BACK else -1
                for there in range(first, n):
                    area += worth[f, there + 1] * ms[5]
            elif k == CHECKPOINT:
                area += max(0.0, wait - ms[3]) * shares[f, 4] + ms[3] * shares[f, 1]
        unused, step = 0.0, 1
        while step < left and step * shares[f, 5] < 1.0:
            unused += ms[1] * (1.0 - step * shares[f, 5])
            step += 1
        need = area + unused + (0.0 if shares[f, 3] > 0.0 else ms[7])  # weight gradients may run to the end
        # Of the activations that are yet to begin, some are computed again; of the others, parts leave.
        best = np.inf
        for computed in range(coming + 1 if rules[2] else 1):
            saved = need - computed * less[f, n]
            begin = max(end, now + inputs + gradients + computed * ms[3])
            parts, level, at_level = 0.0, 0, 0.0
            while begin < best:
                by_memory = now + saved
                if rules[1] == 1:
                    line = link_out + link_back + parts * (ms[4] + ms[5])
                else:
                    line = max(link_out + parts * ms[4], link_back + parts * ms[5])
                by_line = now + line + ms[1] + ms[7] if line > 0.0 else now
                best = min(best, max(begin, by_memory, by_line))
                if by_line >= by_memory or by_memory <= begin or rules[1] == 0 or level == n:
                    break
                saved -= less[f, level]
                parts += 1.0
                at_level += 1.0
                if at_level >= whole - computed:
                    level, at_level = level + 1, 0.0
            if begin >= best:
                break
        end = max(end, best)
    return float(end)


@compiled
def expand(device: OneStage, known: Known, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow. A state is left out for one that is as far, has the same parts on the device and is later in nothing.

    Of activations with as many parts there, the one that began last loses a part, the one that began first gets one
    back, and has its input gradient first: the others' further ways can be exchanged, and none waits longer, as those
    who wait for other devices do so by rank, whichever activation it is.
    An activation may leave more than once, which only makes the least end earlier.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one, as `tally[DONE]` then says.
    """
    rules = device.rules
    bound, heap, count = known.bound, known.heap, known.tally
    row, child = np.zeros(len(known.same)), np.zeros(len(known.same))
    other, third = np.zeros(len(known.same)), np.zeros(len(known.same))
    if count[ROWS] == 0:
        add(row, FIRST, False, _least_end(row, device), known)
    for _ in range(pops):
        if count[LENGTH] == 0 or count[FULL]:
            break
        top = heap[0]
        least = bound[top]
        read(top, row, known)
        if row[STARTED] == rules[0] and row[VISITS] == 0.0 and row[RUNS] == IDLE and row[WAITING] == 0.0:
            count[DONE] = 1
            break
        take(known)
        count[TAKEN] += 1
        if row[STARTED] < rules[0] and FIRST + 3 * int(row[VISITS]) == len(row):  # no column is left
            count[FULL] = 1
            break
        used = _used(row, device)
        for choice in range(6):  # of compute: nothing, F, F to be computed again, B, C, W
            child[:] = row
            now_used = _compute(child, choice, device, used)
            if now_used < 0:
                continue
            visits = int(child[VISITS])
            for first in range(1 + 2 * visits if rules[1] else 1):
                other[:] = child
                held = now_used if first == 0 else _carry(other, 0, first, device, now_used)
                if held < 0:
                    continue
                for second in range(1 + 2 * visits if rules[1] == 2 else 1):
                    third[:] = other
                    if second and _carry(third, 1, second, device, held) < 0:
                        continue
                    if not _advance(third, device):
                        continue
                    # Nothing has started or ended: it only waited.
                    waited = choice + first + second == 0 and row[RUNS] == third[RUNS]
                    waited = waited and row[LINE + 1] == third[LINE + 1] and row[LINE + 4] == third[LINE + 4]
                    end = max(least, _least_end(third, device))
                    add(third, FIRST + 3 * int(third[VISITS]), waited, end, known)
                    if count[FULL]:
                        return float(least)
    if count[FULL]:
        return float(least)
    return float(bound[heap[0]]) if count[LENGTH] else np.inf
