"""Best-first search over what one device can do, on plain arrays so that it can be compiled."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import compiled
from optpipe.model.arrays import Floats, Ints

# Columns of a state: the time; until when compute is busy, and with what; forwards started; ms of weight gradient that
# wait; of each line until when it is busy, with what, and whose part it carries; how many activations are held or away;
# and of each when its B may start, and its parts that are there.
NOW, UNTIL, RUNS, STARTED, WAITING, LINE, VISITS, FIRST = 0, 1, 2, 3, 4, 5, 11, 12
# What runs on compute, and on a line.
IDLE, FORWARD, BACKWARD, AGAIN = 0.0, 1.0, 2.0, 3.0
OUT, BACK = 1.0, 2.0
# In place of the parts of an activation that are there: it is to be computed again, or is being computed.
CHECKPOINT, COMING = -1.0, -2.0
ROWS, DONE, TAKEN, FULL, LENGTH = range(5)  # columns of `count`
NOISE = 1e-9  # ms


@compiled
def _moves(row: Floats, i: int) -> bool:
    """Whether a part of an activation is on its way."""
    return bool((row[LINE + 1] != IDLE and row[LINE + 2] == i) or (row[LINE + 4] != IDLE and row[LINE + 5] == i))


@compiled
def _used(row: Floats, ms: Floats, size: Ints, present: Ints) -> int:
    """The bytes that are held now."""
    used, held = 0, int(row[VISITS])
    for i in range(held):
        k = row[FIRST + 2 * i + 1]
        if row[RUNS] == FORWARD and i == held - 1:
            used += size[1]
        elif k == COMING:
            used += size[2]
        else:
            used += size[4] if k == CHECKPOINT else present[int(k)]
    if row[RUNS] == BACKWARD:
        used += size[3]
    if row[WAITING] > 0.0:
        used += size[5] * int(np.ceil(row[WAITING] / ms[2] - NOISE))
    for line in range(2):
        if row[LINE + 3 * line + 1] == BACK:
            k = int(row[FIRST + 2 * int(row[LINE + 3 * line + 2]) + 1])
            used += present[k + 1] - present[k]
    return used


@compiled
def _compute(row: Floats, choice: int, ms: Floats, rules: Ints, size: Ints, present: Ints, used: int) -> int:
    """Start an op, if that may be; returns the bytes that are held then, or -1."""
    n, held, now = len(present) - 1, int(row[VISITS]), row[NOW]
    if choice == 0:
        return used
    if row[RUNS] != IDLE:
        return -1
    if choice <= 2:
        if row[STARTED] == rules[0] or (choice == 2 and not rules[2]):
            return -1
        row[UNTIL], row[RUNS] = now + ms[0], FORWARD
        row[STARTED] += 1.0
        row[FIRST + 2 * held] = row[UNTIL] + ms[6]
        row[FIRST + 2 * held + 1] = n if choice == 1 else CHECKPOINT
        row[VISITS] += 1.0
        used += size[1]
        return used if used <= size[0] else -1
    for i in range(held):
        at = FIRST + 2 * i
        if choice == 4 and row[at + 1] == CHECKPOINT:
            row[UNTIL], row[RUNS], row[at + 1] = now + ms[3], AGAIN, COMING
            used += size[2] - size[4]
            return used if used <= size[0] else -1
        if choice == 3 and row[at + 1] == n and row[at] <= now and not _moves(row, i):
            row[UNTIL], row[RUNS] = now + ms[1], BACKWARD
            row[at : FIRST + 2 * held - 2] = row[at + 2 : FIRST + 2 * held].copy()
            row[FIRST + 2 * held - 2 : FIRST + 2 * held] = 0.0
            row[VISITS] -= 1.0
            for whose in (LINE + 2, LINE + 5):
                if row[whose - 1] != IDLE and row[whose] > i:
                    row[whose] -= 1.0
            used += size[3] - present[n]
            return used if used <= size[0] else -1
    return -1


@compiled
def _carry(row: Floats, line: int, way: int, lines: int, ms: Floats, present: Ints, memory: int, used: int) -> int:
    """Let a line carry a part, if that may be; returns the bytes that are held then, or -1."""
    n, at, i, out = len(present) - 1, LINE + 3 * line, (way - 1) // 2, (way - 1) % 2 == 0
    if row[at + 1] != IDLE or (lines == 2 and out != (line == 0)):
        return -1
    k, visits = row[FIRST + 2 * i + 1], int(row[VISITS])
    fresh = visits - 1 if row[RUNS] == FORWARD else visits  # its forward runs
    if k < (1.0 if out else 0.0) or (not out and k == n) or i == fresh:
        return -1
    # Another one with as many parts comes first: the last one to leave, the first one to come back.
    begin, end = (i + 1, visits) if out else (0, i)
    if not _moves(row, i):
        for j in range(begin, end):
            if row[FIRST + 2 * j + 1] == k and j != fresh and not _moves(row, j):
                return -1
    if not out:
        used += present[int(k) + 1] - present[int(k)]
    row[at], row[at + 1], row[at + 2] = row[NOW] + (ms[4] if out else ms[5]), OUT if out else BACK, i
    return used if used <= memory else -1


@compiled
def _advance(row: Floats, ms: Floats, n: int) -> bool:
    """Go to the next event. False if there is none."""
    now, visits = row[NOW], int(row[VISITS])
    event = np.inf
    if row[RUNS] != IDLE:
        event = row[UNTIL]
    else:
        for i in range(visits):
            if row[FIRST + 2 * i] > now:
                event = min(event, row[FIRST + 2 * i])
        if row[WAITING] > 0.0:
            whole = np.ceil(row[WAITING] / ms[2] - NOISE) - 1.0
            event = min(event, now + row[WAITING] - whole * ms[2])
    for line in range(2):
        if row[LINE + 3 * line + 1] != IDLE:
            event = min(event, row[LINE + 3 * line])
    if event == np.inf:
        return False
    if row[RUNS] == IDLE:
        left = row[WAITING] - (event - now)
        row[WAITING] = left if left > NOISE else 0.0
    elif row[UNTIL] <= event:
        if row[RUNS] == BACKWARD:
            row[WAITING] += ms[2]
        elif row[RUNS] == AGAIN:
            for i in range(visits):
                if row[FIRST + 2 * i + 1] == COMING:
                    row[FIRST + 2 * i + 1] = n
        row[UNTIL], row[RUNS] = 0.0, IDLE
    for at in (LINE, LINE + 3):
        if row[at + 1] != IDLE and row[at] <= event:
            row[FIRST + 2 * int(row[at + 2]) + 1] += 1.0 if row[at + 1] == BACK else -1.0
            row[at : at + 3] = 0.0
    row[NOW] = event
    for i in range(visits):
        row[FIRST + 2 * i] = max(row[FIRST + 2 * i], event)
    # Of those that are ready alike, by parts.
    for i in range(1, visits):
        j = i
        while j and row[FIRST + 2 * j] == row[FIRST + 2 * j - 2] and row[FIRST + 2 * j + 1] > row[FIRST + 2 * j - 1]:
            if row[RUNS] == FORWARD and j == visits - 1:
                break
            a, b = FIRST + 2 * j - 1, FIRST + 2 * j + 1
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
def _least_end(row: Floats, ms: Floats, rules: Ints, shares: Floats, worth: Floats, less: Floats, n: int) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way back, by link and memory."""
    now, visits, coming = row[NOW], int(row[VISITS]), rules[0] - row[STARTED]
    left = coming + visits  # activations before their input gradient
    rest = max(0.0, row[UNTIL] - now) if row[RUNS] != IDLE else 0.0
    again = 0.0
    back = 0.0  # parts that are to come back
    whole = coming  # activations of which all parts can still leave
    path = now + rest + ms[7] if row[RUNS] == BACKWARD else now
    if coming:
        path = now + rest + coming * ms[0] + ms[6] + ms[1] + ms[7]
    for i in range(visits):
        k = row[FIRST + 2 * i + 1]
        path = max(path, row[FIRST + 2 * i] + ms[1] + ms[7])
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
    gradients = left * ms[2] + row[WAITING] + (ms[2] if row[RUNS] == BACKWARD else 0.0)
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
        for i in range(visits):
            k = row[FIRST + 2 * i + 1]
            wait = row[FIRST + 2 * i] - now
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
def _no_later(known: Floats, row: Floats, visits: int, waited: bool) -> bool:
    for at in (RUNS, STARTED, VISITS, LINE + 1, LINE + 2, LINE + 4, LINE + 5):
        if known[at] != row[at]:
            return False
    for at in (NOW, UNTIL, WAITING, LINE, LINE + 3):
        if known[at] > row[at]:
            return False
    later = waited and known[NOW] < row[NOW]
    for at in range(FIRST, FIRST + 2 * visits, 2):
        later = later or known[at] > row[at] or known[at + 1] != row[at + 1]
    return not later


@compiled
def _before(a: int, b: int, bound: Floats, states: Floats) -> bool:
    """The least end first, of equals the farthest on."""
    return bool(bound[a] < bound[b] or (bound[a] == bound[b] and states[a, NOW] > states[b, NOW]))


@compiled
def _take(bound: Floats, states: Floats, heap: Ints, count: Ints) -> None:
    """Take the first row off the heap."""
    count[LENGTH] -= 1
    last, at = heap[count[LENGTH]], 0
    while True:
        below = 2 * at + 1
        if below >= count[LENGTH]:
            break
        if below + 1 < count[LENGTH] and _before(heap[below + 1], heap[below], bound, states):
            below += 1
        if not _before(heap[below], last, bound, states):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last


@compiled
def _add(
    row: Floats,
    waited: bool,
    end: float,
    states: Floats,
    bound: Floats,
    chain: Ints,
    table: Ints,
    heap: Ints,
    count: Ints,
) -> None:
    """Keep a state, unless another one is as far and later in nothing.

    What that one can do later it does after waiting. So that two states do not stand for each other's waiting, one
    that only waited is left out only for another one at the same time.
    """
    visits = int(row[VISITS])
    code = 7 * int(row[RUNS]) + 31 * int(row[STARTED]) + 1009 * visits
    code += 5 * int(row[LINE + 1]) + 11 * int(row[LINE + 4]) + 17 * int(row[LINE + 2]) + 23 * int(row[LINE + 5])
    for i in range(visits):
        code = (code * 31 + int(row[FIRST + 2 * i + 1]) + 2) % 1_000_000_007
    code %= len(table)
    other = table[code]
    while other >= 0:
        if _no_later(states[other], row, visits, waited):
            return
        other = chain[other]
    new = count[ROWS]
    if new == len(states):
        count[FULL] = 1
        return
    states[new], bound[new] = row, end
    chain[new], table[code] = table[code], new
    count[ROWS] += 1
    at = count[LENGTH]
    count[LENGTH] += 1
    while at:
        above = heap[(at - 1) // 2]
        if not _before(new, above, bound, states):
            break
        heap[at] = above
        at = (at - 1) // 2
    heap[at] = new


@compiled
def expand(
    ms: Floats,
    rules: Ints,
    size: Ints,
    present: Ints,
    shares: Floats,
    worth: Floats,
    less: Floats,
    states: Floats,
    bound: Floats,
    chain: Ints,
    table: Ints,
    heap: Ints,
    count: Ints,
    pops: int,
) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow. A state is left out for one that is as far, has the same parts on the device and is later in nothing.

    Of activations with as many parts there, the one that began last loses a part, the one that began first gets one
    back, and has its input gradient first: the others' further ways can be exchanged, and none waits longer.
    Weight gradients fill what time compute has left, in pieces; an activation may leave more than once. Both only make
    the least end earlier.

    Parameters
    ----------
    ms
        Of F, B, W, C, O and R (one part); from the end of F to the start of B at least; from the end of the last B to
        the end.
    rules
        Micro-batches; lines: 0 if nothing leaves, 1 for both directions; whether activations are computed again.
    size
        Bytes of the memory, of an activation while F, C and B run, between F and C, and of one that waits for W.
    present
        (parts + 1,) bytes of an activation with so many parts there.
    shares
        (measures, 6) what these sizes are worth of the memory: while F, C, B and W run, between F and C, and the most
        that one activation holds while it waits for no W, or 1.
    worth
        (measures, parts + 1) likewise of `present`.
    less
        (measures, parts + 1) by how many ms of all the memory an activation takes less for each further part that
        leaves, falling; then with a recompute.
    states, bound, chain, table, heap, count
        The search so far: rows of states, the least end of each, the next one with the same hash; the first one of each
        hash, a heap of rows; how many rows there are, whether one is complete, states taken, whether no row is left,
        and the heap's length.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one, as `count[DONE]` then says.
    """
    n = len(present) - 1
    child, other, third = np.zeros(states.shape[1]), np.zeros(states.shape[1]), np.zeros(states.shape[1])
    if count[ROWS] == 0:
        states[0, :] = 0.0
        bound[0] = _least_end(states[0], ms, rules, shares, worth, less, n)
        heap[0] = 0
        count[ROWS] = count[LENGTH] = 1
    for _ in range(pops):
        if count[LENGTH] == 0 or count[FULL]:
            break
        top = heap[0]
        least = bound[top]
        row = states[top]
        if row[STARTED] == rules[0] and row[VISITS] == 0.0 and row[RUNS] == IDLE and row[WAITING] == 0.0:
            count[DONE] = 1
            break
        _take(bound, states, heap, count)
        count[TAKEN] += 1
        used = _used(row, ms, size, present)
        for choice in range(5):  # of compute: nothing, F, F to be computed again, B, C
            child[:] = row
            now_used = _compute(child, choice, ms, rules, size, present, used)
            if now_used < 0:
                continue
            visits = int(child[VISITS])
            for first in range(1 + 2 * visits if rules[1] else 1):
                other[:] = child
                held = now_used if first == 0 else _carry(other, 0, first, rules[1], ms, present, size[0], now_used)
                if held < 0:
                    continue
                for second in range(1 + 2 * visits if rules[1] == 2 else 1):
                    third[:] = other
                    if second and _carry(third, 1, second, rules[1], ms, present, size[0], held) < 0:
                        continue
                    if not _advance(third, ms, n):
                        continue
                    # Nothing has started or ended: it only waited.
                    waited = choice + first + second == 0 and row[RUNS] == third[RUNS]
                    waited = waited and row[LINE + 1] == third[LINE + 1] and row[LINE + 4] == third[LINE + 4]
                    end = max(least, _least_end(third, ms, rules, shares, worth, less, n))
                    _add(third, waited, end, states, bound, chain, table, heap, count)
                    if count[FULL]:
                        return float(least)
    return float(bound[heap[0]]) if count[LENGTH] else np.inf
