"""What a host link does next: it brings back the part that is needed soonest, else it takes one away."""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.figures import Figures
from optpipe.dispatch.state import (
    BACK,
    FORWARD,
    MICROBATCH,
    OFFLOAD,
    OUT,
    RELOAD,
    STAGE,
    WAY,
    State,
    look_soon,
    needed_ms,
)
from optpipe.evaluate.jit import compiled_phase
from optpipe.model.arrays import NONE
from optpipe.model.rules import Rules


@compiled_phase
def serve_link(figures: Figures, rules: Rules, state: State, link: int, now: float) -> None:
    """End what a link carries, and start the next transfer, if there is any."""
    state.look_at[link] = np.inf
    if state.carried[link, WAY] != NONE:
        _end_transfer(figures, state, link, now)
    s = _choose_reload(figures, rules, state, link, now)
    if s != NONE:
        _start_reload(figures, state, link, s, now)
        return
    s = _choose_offload(figures, state, link, now)
    if s != NONE:
        _start_offload(figures, state, link, s, now)


@compiled_phase
def _end_transfer(figures: Figures, state: State, link: int, now: float) -> None:
    way, s, j = state.carried[link, WAY], state.carried[link, STAGE], state.carried[link, MICROBATCH]
    d = figures.device[s]
    state.carried[link, WAY] = NONE
    if way == OUT:
        size = figures.part_bytes[state.variant[s, j], s, state.parts_off_device[s, j], state.column[j]]
        state.parts_off_device[s, j] += 1
        if state.running[d]:  # a drop waits for the op that runs
            state.frees[d] += size
        else:
            state.held[d] -= size
        link_back = figures.links[BACK, d]
        if link_back != link:
            look_soon(state, link_back, max(now, state.link_free_at[link_back]))
    if not state.running[d]:
        look_soon(state, len(figures.stages_on_link) + d, now)


@compiled_phase
def _choose_reload(figures: Figures, rules: Rules, state: State, link: int, now: float) -> int:
    """The stage of the part that is needed soonest, of those that fit and are due; NONE if there is none."""
    chosen, soonest = NONE, np.inf
    for s in figures.stages_on_link[link]:
        if s == NONE:
            break
        d = figures.device[s]
        if figures.links[BACK, d] != link:
            continue
        j, forwards = state.next_to_return[s], state.next_microbatch[FORWARD, s]
        while j < forwards and (
            state.parts_to_leave[s, j] <= 0 or state.parts_back[s, j] == state.parts_to_leave[s, j]
        ):
            j += 1
        state.next_to_return[s] = j
        if j == forwards or state.parts_off_device[s, j] <= state.parts_back[s, j]:
            continue
        needed, part = needed_ms(figures, state, s, j), state.parts_back[s, j]
        if part == 0 and needed - rules.lead_ms[s] > now:
            look_soon(state, link, needed - rules.lead_ms[s])
            continue
        size = figures.part_bytes[state.variant[s, j], s, part, state.column[j]]
        if state.held[d] + size <= figures.memory[d] and needed < soonest:
            chosen, soonest = s, needed
    return chosen


@compiled_phase
def _start_reload(figures: Figures, state: State, link: int, s: int, now: float) -> None:
    j = state.next_to_return[s]
    variant, column = state.variant[s, j], state.column[j]
    end = now + figures.ms[variant, RELOAD, s, column]
    part = state.parts_back[s, j]
    state.parts_back[s, j] += 1
    state.parts_to_leave[s, j] = state.parts_sent[s, j]  # no other part of it leaves
    state.held[figures.device[s]] += figures.part_bytes[variant, s, part, column]
    if state.parts_back[s, j] == state.parts_sent[s, j]:
        state.activation_ready[s, j] = end
    _carry(state, link, BACK, s, j, part, now, end)


@compiled_phase
def _choose_offload(figures: Figures, state: State, link: int, now: float) -> int:
    """The stage of the part that could have left first, of those that fit into host memory; NONE if there is none."""
    chosen, oldest = NONE, np.inf
    for s in figures.stages_on_link[link]:
        if s == NONE:
            break
        d = figures.device[s]
        if figures.links[OUT, d] != link:
            continue
        j = _next_to_leave(figures, state, s, now)
        state.next_to_leave[s] = j
        if j == state.next_microbatch[FORWARD, s]:
            continue
        forward_end = state.start[FORWARD, s, j] + figures.ms[0, FORWARD, s, state.column[j]]
        if forward_end > now or state.parts_sent[s, j] >= state.parts_to_leave[s, j]:
            continue
        size = figures.part_bytes[state.variant[s, j], s, state.parts_sent[s, j], state.column[j]]
        if state.hosted[d] + size <= figures.host_memory[d] and forward_end < oldest:
            chosen, oldest = s, forward_end
    return chosen


@compiled_phase
def _next_to_leave(figures: Figures, state: State, s: int, now: float) -> int:
    """The oldest micro-batch with a part that is to leave; those before it keep what they have.

    An activation that would not be back in time, or whose device has no forward to start, would leave in vain. So its
    parts stay, unless an older activation needs their room to come back.
    """
    d, j, forwards = figures.device[s], state.next_to_leave[s], state.next_microbatch[FORWARD, s]
    older = state.next_to_return[s]
    while j < forwards:
        if state.parts_sent[s, j] < state.parts_to_leave[s, j]:
            if state.forwards_left[d] > 0 and not _would_return_late(figures, state, s, j, now):
                break
            if older < j and state.parts_back[s, older] < state.parts_sent[s, older]:
                size = figures.part_bytes[state.variant[s, older], s, state.parts_back[s, older], state.column[older]]
                if state.held[d] - state.frees[d] + size > figures.memory[d]:
                    break
            state.parts_to_leave[s, j] = state.parts_sent[s, j]
        j += 1
    return int(j)


@compiled_phase
def _would_return_late(figures: Figures, state: State, s: int, j: int, now: float) -> bool:
    """Whether what is to leave of an activation, and has left, takes longer to be back than until it is needed."""
    variant, column = state.variant[s, j], state.column[j]
    to_send = state.parts_to_leave[s, j] - state.parts_sent[s, j]
    to_fetch = state.parts_to_leave[s, j] - state.parts_back[s, j]
    takes = to_send * figures.ms[variant, OFFLOAD, s, column] + to_fetch * figures.ms[variant, RELOAD, s, column]
    return bool(needed_ms(figures, state, s, j) < now + takes)


@compiled_phase
def _start_offload(figures: Figures, state: State, link: int, s: int, now: float) -> None:
    j = state.next_to_leave[s]
    part = state.parts_sent[s, j]
    state.parts_sent[s, j] += 1
    state.activation_ready[s, j] = np.inf
    variant, column = state.variant[s, j], state.column[j]
    state.hosted[figures.device[s]] += figures.part_bytes[variant, s, part, column]
    _carry(state, link, OUT, s, j, part, now, now + figures.ms[variant, OFFLOAD, s, column])


@compiled_phase
def _carry(state: State, link: int, way: int, s: int, j: int, part: int, now: float, end: float) -> None:
    state.moved[way, s, j, part] = now
    state.carried[link, WAY] = way
    state.carried[link, STAGE] = s
    state.carried[link, MICROBATCH] = j
    state.link_free_at[link] = end
    state.look_at[link] = end
