"""What a device does next: of the ops that are ready and fit, the one of the lowest rank."""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.figures import Figures
from optpipe.dispatch.state import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, State, look_soon, needed_ms
from optpipe.evaluate.jit import compiled_phase
from optpipe.model.arrays import NONE
from optpipe.model.rules import Rules


@compiled_phase
def end_op(state: State, d: int) -> None:
    state.running[d] = False
    state.held[d] -= state.frees[d]
    state.hosted[d] -= state.frees_on_host[d]
    state.frees[d] = 0
    state.frees_on_host[d] = 0


@compiled_phase
def _next_microbatch(figures: Figures, rules: Rules, state: State, k: int, s: int) -> int:
    """The next micro-batch of a stage with an op of a kind; m if there is none."""
    j, microbatches = state.next_microbatch[k, s], rules.leaves.shape[1]
    while j < microbatches and (
        state.variant[s, j] == 0 if k == RECOMPUTE else figures.place[s, state.column[j]] == NONE
    ):
        j += 1
    state.next_microbatch[k, s] = j
    return int(j)


@compiled_phase
def bytes_to_keep_free(figures: Figures, rules: Rules, state: State, d: int, now: float) -> int:
    """Bytes of the activation that is to come back or to be computed again next: no forward takes them."""
    soonest, size = np.inf, 0
    for s in figures.stages_of_device[d]:
        if s == NONE:
            break
        j = state.next_to_return[s]
        if j < state.next_microbatch[FORWARD, s] and state.parts_off_device[s, j] > state.parts_back[s, j]:
            needed = needed_ms(figures, state, s, j)
            if needed - rules.lead_ms[s] <= now and needed < soonest:
                soonest, size = needed, 0
                for part in range(state.parts_back[s, j], state.parts_sent[s, j]):
                    size += figures.part_bytes[state.variant[s, j], s, part, state.column[j]]
        j = _next_microbatch(figures, rules, state, RECOMPUTE, s)
        if j < rules.leaves.shape[1]:
            ready = max(state.input_ready[RECOMPUTE, s, j], state.activation_ready[s, j])
            if ready <= now and ready < soonest:
                soonest, size = ready, figures.takes[state.variant[s, j], RECOMPUTE, s, state.column[j]]
    return size


@compiled_phase
def choose_op(figures: Figures, rules: Rules, state: State, d: int, now: float, reserved: int) -> tuple[int, int]:
    """Kind and stage of the op of the lowest rank that is ready or worth waiting for, and fits.

    NONE if there is none, or if that op is waited for. A backward or recompute comes before a forward, a forward before
    a weight gradient; of forwards the one farthest along the route; then the oldest micro-batch.
    """
    stages, microbatches = rules.leaves.shape
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


@compiled_phase
def start_op(figures: Figures, rules: Rules, state: State, k: int, s: int, now: float, end: float) -> None:
    d, j = figures.device[s], state.next_microbatch[k, s]
    column, variant = state.column[j], state.variant[s, j]
    state.start[k, s, j] = now
    state.next_microbatch[k, s] += 1
    state.held[d] += figures.takes[variant, k, s, column]
    state.frees[d] += figures.frees[variant, k, s, column]
    state.running[d] = True
    state.free_at[d] = end
    state.look_at[len(figures.stages_on_link) + d] = end
    if k <= BACKWARD:
        state.begin[j] = max(state.begin[j], now - figures.offset_ms[k, s, column])
    if k == FORWARD:
        state.forwards_left[d] -= 1
        state.in_flight[s] += 1
    elif k == BACKWARD:
        state.in_flight[s] -= 1
        state.parts_to_leave[s, j] = min(state.parts_to_leave[s, j], state.parts_sent[s, j])
        for part in range(state.parts_sent[s, j]):
            state.frees_on_host[d] += figures.part_bytes[variant, s, part, column]
        state.input_ready[WEIGHT, s, j] = end
    elif k == RECOMPUTE:
        state.computed_again[s, j] = end
        state.parts_to_leave[s, j] = min(state.parts_to_leave[s, j], state.parts_sent[s, j])


@compiled_phase
def tell_next_stage(figures: Figures, rules: Rules, state: State, k: int, s: int, now: float, end: float) -> None:
    """The next stage of an F or B that has just started learns when its input is there; where its activation is
    computed again, also when that may begin."""
    if k > BACKWARD:
        return
    j = state.next_microbatch[k, s] - 1
    kind, stage = k, figures.next_stage[k, s, state.column[j]]
    if stage == NONE:
        if k == BACKWARD:
            return
        kind, stage = BACKWARD, s  # after the last forward comes the backward of the same stage
    d = figures.device[stage]
    ready = end + figures.message_ms[kind, stage, state.column[j]]
    state.input_ready[kind, stage, j] = ready
    if kind == BACKWARD and state.variant[stage, j] > 0:
        forward_end = state.start[FORWARD, stage, j] + figures.ms[0, FORWARD, stage, state.column[j]]
        ready = max(now, ready - rules.lead_ms[stage], forward_end)
        state.input_ready[RECOMPUTE, stage, j] = ready
    if d != figures.device[s]:
        look_soon(state, len(figures.stages_on_link) + d, max(ready, state.free_at[d]))
