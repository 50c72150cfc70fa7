"""The clock of the list scheduler: an event loop on arrays, compiled.

Host links and devices are looked at when something has ended there or may begin: `State.look_at` has the moment, for
links first, then for devices. A plain list scheduler with objects does the same (tests: `plain_list_scheduler`). How it
decides is described in `simulate`.

Here k is a kind of op, s a stage, d a device, and j the j-th micro-batch to enter.
"""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.figures import Figures, State
from optpipe.evaluate.jit import compiled_part
from optpipe.model.arrays import NONE
from optpipe.model.rules import Rules

ROUNDING = 1e-9  # of sums of times
FORWARD, BACKWARD, WEIGHT, RECOMPUTE, OFFLOAD, RELOAD = range(6)  # rows by kind of op, of a part's O and R
OUT, BACK = range(2)  # rows by way of a transfer
WAY, STAGE, MICROBATCH = range(3)  # columns of `State.carried`
PEER = 1  # the channel of evictions
AT_PEER = -1  # the variant of what is evicted


@compiled_part
def list_all(figures: Figures, rules: Rules, state: State, stop_ms: float) -> bool:
    """Start all ops, one after the other: afterwards `state.start` and `state.moved` have when each starts.

    Returns whether all compute ops have started. They have not where nothing that is ready fits, or an op, or what a
    device has still to do, would end after `stop_ms`: the rest is then not listed.
    """
    to_start, has_relief = _reset(figures, rules, state)
    links = len(figures.stages_on_link)
    late_ms = stop_ms * (1.0 + ROUNDING)
    while True:
        at = int(state.look_at.argmin())  # of several at one moment the first; devices come after links
        now = state.look_at[at]
        if now == np.inf:
            return bool(to_start == 0)
        if at < links:
            _serve_link(figures, rules, state, at, now)
            continue
        d = at - links
        if state.running[d]:
            state.running[d] = False
            state.held[d] -= state.frees[d]
            state.pinned[d] += state.frees_on_host[d]
            state.frees[d] = 0
            state.frees_on_host[d] = 0
            if has_relief:  # reloads come before forwards: links are looked at first, then this device again
                _look_for_room(figures, state, d, NONE, now)
                continue
        reserved = _bytes_to_keep_free(figures, rules, state, d, now) if has_relief else 0
        k, s = _choose_op(figures, rules, state, d, now, reserved)
        if k == NONE:  # `_choose_op` has set when to look here again
            continue
        ms = _op_ms(figures, state, k, s, state.next_microbatch[k, s])
        end = now + ms
        if k != RECOMPUTE:  # `work_left` leaves out Cs
            state.work_left[d] -= ms
        if end > stop_ms or end + state.work_left[d] > late_ms:
            return False
        _start_op(figures, rules, state, k, s, now, end)
        to_start -= 1


@compiled_part
def _reset(figures: Figures, rules: Rules, state: State) -> tuple[int, bool]:
    """Empty devices and links, all forwards of first stages ready.

    Returns the number of compute ops, and whether some activations leave or are computed again.
    """
    to_start, has_relief = 0, False
    for times in (state.start, state.input_ready):
        times[:] = np.inf
    state.moved[:] = np.inf
    for ready in (state.activation_ready, state.computed_again):
        ready[:] = 0.0
    for moments in (state.begin, state.work_left, state.free_at, state.look_at, state.link_free_at):
        moments[:] = 0.0
    state.next_microbatch[:] = 0
    for table in (state.parts_to_leave, state.parts_sent, state.parts_off_device, state.parts_back, state.variant):
        table[:] = 0
    for numbers in (state.in_flight, state.forwards_left):
        numbers[:] = 0
    state.next_to_leave[:] = 0
    state.next_to_return[:] = 0
    for nbytes in (state.held, state.pinned, state.frees, state.frees_on_host):
        nbytes[:] = 0
    for d in range(len(figures.node)):
        state.unpinned[figures.node[d]] = figures.host_memory[d]
    state.running[:] = False
    state.carried[:] = NONE
    state.look_at[: len(figures.stages_on_link)] = np.inf
    for j in range(len(rules.order)):
        state.column[j] = figures.class_of[rules.order[j]]
        for d in range(len(figures.memory)):
            state.work_left[d] += figures.work_ms[d, state.column[j]]
        for s in range(len(rules.in_flight)):
            place = figures.place[s, state.column[j]]
            if place == NONE:
                continue
            if place == 0:
                state.input_ready[FORWARD, s, j] = 0.0
            state.forwards_left[figures.device[s]] += 1
            state.parts_to_leave[s, j] = rules.parts[s, j]
            state.variant[s, j] = 1 + rules.level[s, j]
            to_start += 3  # F, B and W
            if rules.parts[s, j] > 0:
                has_relief = True
            if state.variant[s, j] > 0:
                to_start, has_relief = to_start + 1, True
                state.computed_again[s, j] = np.inf
    return to_start, has_relief


@compiled_part
def _look_soon(state: State, place: int, moment: float) -> None:
    """Look at a link or device no later than at a moment."""
    state.look_at[place] = min(state.look_at[place], moment)


@compiled_part
def _look_for_room(figures: Figures, state: State, d: int, but: int, now: float) -> None:
    """Look at the links that may have something for a device, or for what is to come back from it, but at one."""
    for link in figures.links_for_room[d]:
        if link == NONE:
            break
        if link != but:
            _look_soon(state, link, max(now, state.link_free_at[link]))


@compiled_part
def _op_ms(figures: Figures, state: State, k: int, s: int, j: int) -> float:
    """How long a compute op takes; F, B and W take the same by each variant."""
    return float(figures.ms[state.variant[s, j], k, s, state.column[j]])


@compiled_part
def _needed_ms(figures: Figures, state: State, s: int, j: int) -> float:
    """When what has left is expected to be needed: by the backward, or by the recompute before it."""
    column, variant = state.column[j], state.variant[s, j]
    needed = state.begin[j] + figures.offset_ms[BACKWARD, s, column]
    if variant > 0:
        needed -= figures.ms[variant, RECOMPUTE, s, column]
    return float(needed)


@compiled_part
def listed_ms(figures: Figures, state: State, span: bool) -> float:
    """The makespan of what has been listed, or the longest span of a device."""
    kinds, _, microbatches = state.start.shape
    longest = 0.0
    for d in range(len(figures.memory)):
        first, last = np.inf, 0.0
        for s in figures.stages_of_device[d]:
            if s == NONE:
                break
            for k in range(kinds):
                for j in range(microbatches):
                    if state.start[k, s, j] < np.inf:
                        first = min(first, state.start[k, s, j])
                        last = max(last, state.start[k, s, j] + _op_ms(figures, state, k, s, j))
        if last > 0.0:
            longest = max(longest, last - first if span else last)
    return longest


# What a device does next: of the ops that are ready and fit, the one of the lowest rank.


@compiled_part
def _next_microbatch(figures: Figures, rules: Rules, state: State, k: int, s: int) -> int:
    """The next micro-batch of a stage with an op of a kind; m if there is none."""
    j, microbatches = state.next_microbatch[k, s], len(rules.order)
    while j < microbatches and (
        state.variant[s, j] <= 0 if k == RECOMPUTE else figures.place[s, state.column[j]] == NONE
    ):
        j += 1
    state.next_microbatch[k, s] = j
    return int(j)


@compiled_part
def _bytes_to_keep_free(figures: Figures, rules: Rules, state: State, d: int, now: float) -> int:
    """Bytes of the activation that is to come back or to be computed again next: no forward takes them."""
    soonest, size = np.inf, 0
    for s in figures.stages_of_device[d]:
        if s == NONE:
            break
        for queue in state.next_to_return:  # one by each channel
            j = queue[s]
            if j < state.next_microbatch[FORWARD, s] and state.parts_off_device[s, j] > state.parts_back[s, j]:
                needed = _needed_ms(figures, state, s, j)
                if needed - rules.lead_ms[s] <= now and needed < soonest:
                    soonest, size = needed, 0
                    for part in range(state.parts_back[s, j], state.parts_sent[s, j]):
                        size += figures.part_bytes[state.variant[s, j], s, part, state.column[j]]
        j = _next_microbatch(figures, rules, state, RECOMPUTE, s)
        if j < len(rules.order):
            ready = max(state.input_ready[RECOMPUTE, s, j], state.activation_ready[s, j])
            if ready <= now and ready < soonest:
                soonest, size = ready, figures.takes[state.variant[s, j], RECOMPUTE, s, state.column[j]]
    return size


@compiled_part
def _choose_op(figures: Figures, rules: Rules, state: State, d: int, now: float, reserved: int) -> tuple[int, int]:
    """Kind and stage of the op of the lowest rank that is ready or worth waiting for, and fits.

    NONE if there is none, or if that op is waited for. A backward or recompute comes before a forward, a forward before
    a weight gradient; of forwards the one farthest along the route; then the oldest micro-batch.
    """
    stages, microbatches = len(rules.in_flight), len(rules.order)
    room, look_at = figures.memory[d] - state.held[d], np.inf
    kind, stage, lowest, ready_at = NONE, NONE, 0, 0.0
    for k in range(4):
        for s in figures.stages_of_device[d]:
            if s == NONE:
                break
            j = _next_microbatch(figures, rules, state, k, s)
            if j == microbatches:
                continue
            ready = state.input_ready[k, s, j]
            if k == BACKWARD:
                ready = max(ready, state.activation_ready[s, j], state.computed_again[s, j])
            elif k == RECOMPUTE:
                ready = max(ready, state.activation_ready[s, j])
            if ready > now:
                look_at = min(look_at, ready)
                if k > BACKWARD or ready > now + rules.wait_ms[k, s]:
                    continue
            rank, variant = j, state.variant[s, j] if k == RECOMPUTE else 0  # others take the same by each level
            takes = figures.takes[variant, k, s, state.column[j]]
            if k == FORWARD:
                if state.in_flight[s] >= rules.in_flight[s]:
                    continue
                rank += (stages - figures.place[s, state.column[j]]) * microbatches
                takes += reserved
            elif k == WEIGHT:
                rank += (stages + 1) * microbatches
            if takes <= room and (kind == NONE or rank < lowest):
                kind, stage, lowest, ready_at = k, s, rank, ready
    state.look_at[len(figures.stages_on_link) + d] = look_at
    return (kind, stage) if ready_at <= now else (NONE, NONE)


@compiled_part
def _start_op(figures: Figures, rules: Rules, state: State, k: int, s: int, now: float, end: float) -> None:
    """Start a compute op; of an F or B, set when the input of the op after it is there, and when the stage of that op
    may recompute its activation."""
    d, j = figures.device[s], state.next_microbatch[k, s]
    column, variant = state.column[j], state.variant[s, j]
    state.start[k, s, j] = now
    state.next_microbatch[k, s] += 1
    state.held[d] += figures.takes[variant, k, s, column]
    state.frees[d] += figures.frees[variant, k, s, column]
    state.running[d] = True
    state.free_at[d] = end
    state.look_at[len(figures.stages_on_link) + d] = end
    if k == RECOMPUTE:
        state.computed_again[s, j] = end
        state.parts_to_leave[s, j] = min(state.parts_to_leave[s, j], state.parts_sent[s, j])
    if k > BACKWARD:
        return
    state.begin[j] = max(state.begin[j], now - figures.offset_ms[k, s, column])
    if k == FORWARD:
        state.forwards_left[d] -= 1
        state.in_flight[s] += 1
    else:
        state.in_flight[s] -= 1
        state.parts_to_leave[s, j] = min(state.parts_to_leave[s, j], state.parts_sent[s, j])
        for part in range(state.parts_sent[s, j] if variant != AT_PEER else 0):
            state.frees_on_host[d] += figures.part_bytes[variant, s, part, column]
        state.input_ready[WEIGHT, s, j] = end
    after, stage = k, figures.next_stage[k, s, column]
    if stage == NONE:
        if k == BACKWARD:
            return
        after, stage = BACKWARD, s  # after the last forward comes the backward of the same stage
    ready = end + figures.message_ms[after, stage, column]
    state.input_ready[after, stage, j] = ready
    if after == BACKWARD and state.variant[stage, j] > 0:
        forward_end = state.start[FORWARD, stage, j] + figures.ms[0, FORWARD, stage, column]
        ready = max(now, ready - rules.lead_ms[stage], forward_end)
        state.input_ready[RECOMPUTE, stage, j] = ready
    other = figures.device[stage]
    if other != d:
        _look_soon(state, len(figures.stages_on_link) + other, max(ready, state.free_at[other]))


# What a link does next: it brings back the part that is needed soonest, else it takes one away, to the host or, on the
# link of a device to its peer, into the peer's memory.


@compiled_part
def _serve_link(figures: Figures, rules: Rules, state: State, link: int, now: float) -> None:
    """End what a link carries, and start the next transfer, if there is any."""
    state.look_at[link] = np.inf
    channel = figures.channel[link]
    if state.carried[link, WAY] != NONE:
        _end_transfer(figures, state, link, channel, now)
    way, k, s = BACK, RELOAD, _choose_reload(figures, rules, state, link, channel, now)
    if s == NONE:
        way, k, s = OUT, OFFLOAD, _choose_offload(figures, state, link, channel, now)
    if s == NONE:
        return
    d = figures.device[s]
    j = state.next_to_return[channel, s] if way == BACK else state.next_to_leave[channel, s]
    part = state.parts_back[s, j] if way == BACK else state.parts_sent[s, j]
    variant, column = state.variant[s, j], state.column[j]
    size, end = figures.part_bytes[variant, s, part, column], now + figures.ms[variant, k, s, column]
    if way == BACK:
        state.parts_back[s, j] += 1
        state.parts_to_leave[s, j] = state.parts_sent[s, j]  # no other part of it leaves
        state.held[d] += size
        if state.parts_back[s, j] == state.parts_sent[s, j]:
            state.activation_ready[s, j] = end
    else:
        state.parts_sent[s, j] += 1
        state.activation_ready[s, j] = np.inf
        if channel == PEER:
            state.held[figures.peer[d]] += size
        else:
            more = max(0, size - state.pinned[d])
            state.pinned[d] -= size - more
            state.unpinned[figures.node[d]] -= more
    state.moved[way, s, j, part] = now
    state.carried[link, WAY], state.carried[link, STAGE], state.carried[link, MICROBATCH] = way, s, j
    state.link_free_at[link] = end
    state.look_at[link] = end


@compiled_part
def _end_transfer(figures: Figures, state: State, link: int, channel: int, now: float) -> None:
    way, s, j = state.carried[link, WAY], state.carried[link, STAGE], state.carried[link, MICROBATCH]
    d = figures.device[s]
    state.carried[link, WAY] = NONE
    if way == OUT:
        size = figures.part_bytes[state.variant[s, j], s, state.parts_off_device[s, j], state.column[j]]
        state.parts_off_device[s, j] += 1
        _let_go(figures, state, d, size, link, now)
    elif channel == PEER:
        _let_go(figures, state, figures.peer[d], figures.part_bytes[AT_PEER, s, 0, state.column[j]], link, now)
    if not state.running[d]:
        _look_soon(state, len(figures.stages_on_link) + d, now)


@compiled_part
def _let_go(figures: Figures, state: State, d: int, size: int, link: int, now: float) -> None:
    """Bytes of a device go that a link has taken away, when the op that runs there has ended."""
    if state.running[d]:
        state.frees[d] += size
    else:
        state.held[d] -= size
        _look_soon(state, len(figures.stages_on_link) + d, now)
    _look_for_room(figures, state, d, link, now)


@compiled_part
def _choose_reload(figures: Figures, rules: Rules, state: State, link: int, channel: int, now: float) -> int:
    """The stage of the part that is needed soonest, of those that fit and are due; NONE if there is none."""
    chosen, soonest = NONE, np.inf
    for s in figures.stages_on_link[link]:
        if s == NONE:
            break
        d = figures.device[s]
        if figures.links[channel, BACK, d] != link:
            continue
        j, forwards = state.next_to_return[channel, s], state.next_microbatch[FORWARD, s]
        while j < forwards and (
            state.parts_to_leave[s, j] <= 0
            or state.parts_back[s, j] == state.parts_to_leave[s, j]
            or (state.variant[s, j] == AT_PEER) != (channel == PEER)
        ):
            j += 1
        state.next_to_return[channel, s] = j
        if j == forwards or state.parts_off_device[s, j] <= state.parts_back[s, j]:
            continue
        needed, part = _needed_ms(figures, state, s, j), state.parts_back[s, j]
        if part == 0 and needed - rules.lead_ms[s] > now:
            _look_soon(state, link, needed - rules.lead_ms[s])
            continue
        size = figures.part_bytes[state.variant[s, j], s, part, state.column[j]]
        if state.held[d] + size <= figures.memory[d] and needed < soonest:
            chosen, soonest = s, needed
    return chosen


@compiled_part
def _choose_offload(figures: Figures, state: State, link: int, channel: int, now: float) -> int:
    """The stage of the part that could have left first, of those that fit where they go to; NONE if there is none."""
    chosen, oldest = NONE, np.inf
    for s in figures.stages_on_link[link]:
        if s == NONE:
            break
        d = figures.device[s]
        if figures.links[channel, OUT, d] != link:
            continue
        j = _next_to_leave(figures, state, channel, s, now)
        state.next_to_leave[channel, s] = j
        if j == state.next_microbatch[FORWARD, s]:
            continue
        forward_end = state.start[FORWARD, s, j] + figures.ms[0, FORWARD, s, state.column[j]]
        if forward_end > now or state.parts_sent[s, j] >= state.parts_to_leave[s, j]:
            continue
        size = figures.part_bytes[state.variant[s, j], s, state.parts_sent[s, j], state.column[j]]
        if channel == PEER:
            fits = state.held[figures.peer[d]] + size <= figures.memory[figures.peer[d]]
        else:
            fits = size <= state.pinned[d] + state.unpinned[figures.node[d]]
        if fits and forward_end < oldest:
            chosen, oldest = s, forward_end
    return chosen


@compiled_part
def _next_to_leave(figures: Figures, state: State, channel: int, s: int, now: float) -> int:
    """The oldest micro-batch with a part that is to leave by a channel; those before it keep what they have.

    An activation that would not be back in time, or whose device has no forward to start, would leave in vain. So its
    parts stay, unless an older activation needs their room to come back.
    """
    d, j, forwards = figures.device[s], state.next_to_leave[channel, s], state.next_microbatch[FORWARD, s]
    older = state.next_to_return[channel, s]
    while j < forwards:
        to_send = state.parts_to_leave[s, j] - state.parts_sent[s, j]
        if to_send > 0 and (state.variant[s, j] == AT_PEER) == (channel == PEER):
            to_fetch = state.parts_to_leave[s, j] - state.parts_back[s, j]
            send_ms = figures.ms[state.variant[s, j], OFFLOAD, s, state.column[j]]
            fetch_ms = figures.ms[state.variant[s, j], RELOAD, s, state.column[j]]
            back_at = now + (to_send * send_ms + to_fetch * fetch_ms)
            if state.forwards_left[d] > 0 and back_at <= _needed_ms(figures, state, s, j):
                break
            if older < j and state.parts_back[s, older] < state.parts_sent[s, older]:
                size = figures.part_bytes[state.variant[s, older], s, state.parts_back[s, older], state.column[older]]
                if state.held[d] - state.frees[d] + size > figures.memory[d]:
                    break
            state.parts_to_leave[s, j] = state.parts_sent[s, j]
        j += 1
    return int(j)
