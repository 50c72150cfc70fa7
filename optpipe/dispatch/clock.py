"""The clock of the list scheduler, on plain arrays so that it can be compiled."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import LazyJit
from optpipe.model.arrays import Floats, Ints

AGAIN = -1  # in place of a number of parts that leave: the activation is computed again


def list_ops(
    ms: Floats,
    device: Ints,
    own: Ints,
    p2p_ms: float,
    takes: Ints,
    frees: Ints,
    frees_again: Ints,
    memory: Ints,
    host_memory: Ints,
    part_bytes: Ints,
    lines: Ints,
    users: Ints,
    expected: Floats,
    in_flight: Ints,
    wait_ms: Floats,
    leaves: Ints,
    lead_ms: Floats,
    stop_ms: float,
    start: Floats,
    moved: Floats,
) -> int:
    """Start ops of kind k (0: F, 1: B, 2: W, 3: C) and place s on the route, and transfers (0: O, 1: R), one after the
    other.

    Parameters
    ----------
    ms
        (6, S) of each F, B, W, C, O and R; the last two of one part.
    device
        (S,) of each stage.
    own
        (D, 4S) the compute ops of each device as k·S + s, then -1.
    takes, frees
        (4, S) bytes of each compute op; `frees_again` (S,) of an F whose activation is computed again.
    memory, host_memory
        (D,) bytes.
    part_bytes
        (S, parts) of each part.
    lines
        (2, D) what carries each device's offloads and reloads: the same line, or one each way.
    users
        (lines, S) the stages on each line, then -1.
    expected
        (2, S) how long after its micro-batch's begin each stage's F, B starts at full speed.
    in_flight, wait_ms, leaves, lead_ms
        The rules, as in `Rules`.
    start, moved
        (4, S, m) and (2, S, m, parts) are filled: when each compute op starts, and each transfer; infinity if it does
        not.

    Returns
    -------
    How many compute ops have started; not all if one would end behind `stop_ms`, or nothing that is ready fits.

    Notes
    -----
    One function, because numba counts the references to each array anew in each call of another one: with the four
    choices (of a reload, of an offload, of the room to keep, of an op) as functions of arrays, the search takes several
    times as long, also where numba inlines them, and longer still with a record of the state.
    """
    stages, microbatches, devices, links = len(device), start.shape[2], len(memory), len(users)
    ready = np.full(start.shape, np.inf)  # when the input of an op is there
    ready[0, 0, :] = 0.0
    here = np.zeros((stages, microbatches))  # when all of an activation is on the device
    start[:] = np.inf
    moved[:] = np.inf
    following = np.zeros((4, stages), dtype=np.int64)  # the next micro-batch of each kind and stage
    begun = np.zeros(microbatches)  # when it would have begun, had it run at full speed to where it is
    left = np.zeros(devices, dtype=np.int64)  # forwards that are yet to start
    for s in range(stages):
        left[device[s]] += microbatches
    held, hosted = np.zeros(devices, dtype=np.int64), np.zeros(devices, dtype=np.int64)
    freed, host_freed = held.copy(), held.copy()  # at the end of the op that runs
    runs = np.zeros(devices, dtype=np.bool_)
    free_at = np.zeros(devices)
    look_at = np.full(links + devices, np.inf)  # when a line or a device next looks for something to start
    look_at[links:] = 0.0
    # Activations that leave: how many parts are to leave, have begun to, have left, have begun to come back.
    leaving = leaves.copy()
    gone, dropped, coming = np.zeros_like(leaves), np.zeros_like(leaves), np.zeros_like(leaves)
    next_out, next_back = np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64)
    carried = np.full((links, 2), -1)  # way and s·m + j of what each line carries
    line_free_at = np.zeros(links)
    relieved = False
    for s in range(stages):
        for j in range(microbatches):
            relieved = relieved or leaves[s, j] != 0
    done = 0
    while True:
        # The next event.
        at = 0
        for other in range(1, links + devices):
            if look_at[other] < look_at[at]:
                at = other
        now = look_at[at]
        if now == np.inf:
            return done
        if at < links:
            # A line ends what it carries.
            look_at[at] = np.inf
            if carried[at, 0] >= 0:
                way, s, j = carried[at, 0], carried[at, 1] // microbatches, carried[at, 1] % microbatches
                d = device[s]
                carried[at, 0] = -1
                if way == 0:
                    bytes_ = part_bytes[s, dropped[s, j]]
                    dropped[s, j] += 1
                    if runs[d]:
                        freed[d] += bytes_
                    else:
                        held[d] -= bytes_
                    other = lines[1, d]
                    if other != at:
                        look_at[other] = min(look_at[other], max(now, line_free_at[other]))
                if not runs[d]:
                    look_at[links + d] = min(look_at[links + d], now)
            # It chooses what comes back, the part that is needed soonest.
            best, best_way, best_moment = -1, -1, np.inf
            for s in users[at]:
                if s < 0:
                    break
                d = device[s]
                if lines[1, d] != at:
                    continue
                j = next_back[s]
                while j < following[0, s] and (leaving[s, j] <= 0 or coming[s, j] == leaving[s, j]):
                    j += 1
                next_back[s] = j
                if j == following[0, s] or dropped[s, j] <= coming[s, j]:
                    continue
                moment = begun[j] + expected[1, s]
                if coming[s, j] == 0 and moment - lead_ms[s] > now:
                    look_at[at] = min(look_at[at], moment - lead_ms[s])
                elif held[d] + part_bytes[s, coming[s, j]] <= memory[d] and moment < best_moment:
                    best, best_way, best_moment = s, 1, moment
            # If there is nothing, it chooses what leaves, the oldest.
            if best < 0:
                for s in users[at]:
                    if s < 0:
                        break
                    d = device[s]
                    if lines[0, d] != at:
                        continue
                    j = next_out[s]
                    while j < following[0, s] and gone[s, j] >= leaving[s, j]:
                        j += 1
                    back = next_back[s]
                    while j < following[0, s] and (left[d] == 0 or ready[1, s, j] <= now):
                        older = back < j and coming[s, back] < gone[s, back]
                        if older and held[d] - freed[d] + part_bytes[s, coming[s, back]] > memory[d]:
                            break  # an older one needs its room
                        leaving[s, j] = min(leaving[s, j], gone[s, j])  # what is left of it would leave in vain
                        j += 1
                    next_out[s] = j
                    if j == following[0, s]:
                        continue
                    moment = start[0, s, j] + ms[0, s]
                    if moment > now or gone[s, j] >= leaving[s, j]:
                        continue
                    if hosted[d] + part_bytes[s, gone[s, j]] <= host_memory[d] and moment < best_moment:
                        best, best_way, best_moment = s, 0, moment
            # It starts that transfer.
            if best >= 0:
                s, d = best, device[best]
                if best_way == 1:
                    j = next_back[s]
                    leaving[s, j] = gone[s, j]
                    part = coming[s, j]
                    coming[s, j] += 1
                    held[d] += part_bytes[s, part]
                else:
                    j = next_out[s]
                    part = gone[s, j]
                    gone[s, j] += 1
                    here[s, j] = np.inf
                    hosted[d] += part_bytes[s, part]
                end = now + ms[4 + best_way, s]
                if best_way == 1 and coming[s, j] == gone[s, j]:
                    here[s, j] = end
                moved[best_way, s, j, part] = now
                carried[at, 0], carried[at, 1] = best_way, s * microbatches + j
                look_at[at] = line_free_at[at] = end
            continue
        # A device ends what it runs.
        d = at - links
        if runs[d]:
            runs[d] = False
            held[d] -= freed[d]
            hosted[d] -= host_freed[d]
            freed[d] = host_freed[d] = 0
            if relieved:  # reloads come before forwards
                for way in range(2):
                    line = lines[way, d]
                    look_at[line] = min(look_at[line], max(now, line_free_at[line]))
                continue
        look_at[at] = np.inf
        # What is to come back next keeps its room.
        room = 0
        if relieved:
            moment = np.inf
            for op in own[d]:
                if op < 0 or op >= stages:
                    break
                s = op
                j = next_back[s]
                if j < following[0, s] and dropped[s, j] > coming[s, j]:
                    wanted = begun[j] + expected[1, s]
                    if wanted - lead_ms[s] <= now and wanted < moment:
                        moment, room = wanted, 0
                        for part in range(coming[s, j], gone[s, j]):
                            room += part_bytes[s, part]
                j = following[3, s]
                if j < microbatches and leaves[s, j] < 0 and ready[3, s, j] <= now and ready[3, s, j] < moment:
                    moment, room = ready[3, s, j], takes[3, s]
        # It chooses an op.
        best, best_rank = -1, 0
        for op in own[d]:
            if op < 0:
                break
            k, s = op // stages, op % stages
            j = following[k, s]
            if k == 3:
                while j < microbatches and leaves[s, j] >= 0:
                    j += 1
                following[3, s] = j
            if j == microbatches:
                continue
            moment = ready[k, s, j]
            if k == 1:
                moment = max(moment, here[s, j])
            if moment > now:
                look_at[at] = min(look_at[at], moment)
                if k > 1 or moment > now + wait_ms[k, s]:
                    continue
            more = takes[k, s]
            if k == 0:
                more += room
            if held[d] + more > memory[d]:
                continue
            if k == 0 and j - following[1, s] >= in_flight[s]:
                continue
            rank = j
            if k == 0:
                rank += (stages - s) * microbatches
            elif k == 2:
                rank += (stages + 1) * microbatches
            if best < 0 or rank < best_rank:
                best, best_rank = op, rank
        if best < 0:
            continue
        k, s = best // stages, best % stages
        j = following[k, s]
        if ready[k, s, j] > now or (k == 1 and here[s, j] > now):
            continue  # wait for it
        end = now + ms[k, s]
        if end > stop_ms:
            return done
        # It starts that op.
        start[k, s, j] = now
        following[k, s] += 1
        held[d] += takes[k, s]
        freed[d] += frees[k, s]
        if k < 2:
            begun[j] = max(begun[j], now - expected[k, s])
        if k == 0:
            left[d] -= 1
            if leaves[s, j] < 0:
                freed[d] += frees_again[s] - frees[0, s]
                here[s, j] = np.inf
        elif k == 1:
            leaving[s, j] = min(leaving[s, j], gone[s, j])
            for part in range(gone[s, j]):
                host_freed[d] += part_bytes[s, part]
            ready[2, s, j] = end
        elif k == 3:
            here[s, j] = end
        runs[d] = True
        free_at[d] = look_at[at] = end
        done += 1
        # The next stage on the way learns when the result is there.
        if k > 1 or (k == 1 and s == 0):
            continue
        to_kind, to = k, s + 1 - 2 * k
        if to == stages:  # behind the last stage stands its own backward
            to_kind, to = 1, s
        moment = end if device[to] == d else end + p2p_ms
        ready[to_kind, to, j] = moment
        if to_kind == 1 and leaves[to, j] < 0:
            ready[3, to, j] = moment = max(now, moment - lead_ms[to], start[0, to, j] + ms[0, to])
        there = device[to]
        if there != d:
            look_at[links + there] = min(look_at[links + there], max(moment, free_at[there]))


def length_ms(ms: Floats, device: Ints, devices: int, start: Floats, span: bool) -> float:
    """The makespan, or the longest span of a device, from the starts of F, B, W and C."""
    first, last = np.full(devices, np.inf), np.zeros(devices)
    kinds, stages, m = start.shape
    for k in range(kinds):
        for s in range(stages):
            for j in range(m):
                if start[k, s, j] < np.inf:
                    first[device[s]] = min(first[device[s]], start[k, s, j])
                    last[device[s]] = max(last[device[s]], start[k, s, j] + ms[k, s])
    if not span:
        return float(last.max())
    longest = 0.0
    for d in range(devices):
        if first[d] < np.inf:
            longest = max(longest, last[d] - first[d])
    return longest


listed_ops, listed_ms = LazyJit(list_ops), LazyJit(length_ms)
