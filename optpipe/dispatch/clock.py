"""The clock of the list scheduler: an event loop on arrays, compiled.

Host links and devices are looked at when something has ended there or may begin: `State.look_at` has the moment, for
links first, then for devices. A plain list scheduler with objects does the same (tests: `plain_list_scheduler`). What
it decides is told in `simulate`.

As everywhere here k is a kind of op, s a stage in `stage_order`, d a device, and j the j-th micro-batch to enter.
"""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.devices import bytes_to_keep_free, choose_op, end_op, start_op, tell_next_stage
from optpipe.dispatch.figures import Figures
from optpipe.dispatch.links import serve_link
from optpipe.dispatch.state import RECOMPUTE, State, look_soon_at_links, reset
from optpipe.evaluate.jit import compiled, compiled_in_place, compiled_phase
from optpipe.model.arrays import NONE
from optpipe.model.rules import Rules

ROUNDING = 1e-9  # of sums of times


@compiled_in_place
def list_ops(figures: Figures, rules: Rules, state: State, stop_ms: float) -> bool:
    """Start all ops, one after the other.

    Parameters
    ----------
    state
        Changed: afterwards `start` and `moved` say when ops and transfers start.
    stop_ms
        No compute op may end later. If what a device has still to do would, the rest is not listed.

    Returns
    -------
    Whether all compute ops have started: not if one would end after `stop_ms`, or if nothing that is ready fits.
    """
    reset(figures, rules, state)
    links = len(figures.stages_on_link)
    recomputed, offloaded = _count_relieved(state)
    late_ms = stop_ms * (1.0 + ROUNDING)
    to_start = 3 * state.forwards_left.sum() + recomputed  # F, B and W of each, and Cs
    has_relief = recomputed + offloaded > 0
    while True:
        at = int(state.look_at.argmin())  # of several at one moment the first; devices come after links
        now = state.look_at[at]
        if now == np.inf:
            return bool(to_start == 0)
        if at < links:
            serve_link(figures, rules, state, at, now)
            continue
        d = at - links
        if state.running[d]:
            end_op(state, d)
            if has_relief:  # reloads come before forwards: links are looked at first, then this device again
                look_soon_at_links(figures, state, d, now)
                continue
        reserved = bytes_to_keep_free(figures, rules, state, d, now) if has_relief else 0
        k, s = choose_op(figures, rules, state, d, now, reserved)
        if k == NONE:  # `choose_op` has set when to look here again
            continue
        ms = _op_ms(figures, state, k, s, state.next_microbatch[k, s])
        end = now + ms
        if k != RECOMPUTE:  # `work_left` leaves out Cs
            state.work_left[d] -= ms
        if end > stop_ms or end + state.work_left[d] > late_ms:
            return False
        start_op(figures, rules, state, k, s, now, end)
        tell_next_stage(figures, rules, state, k, s, now, end)
        to_start -= 1


@compiled_phase
def _count_relieved(state: State) -> tuple[int, int]:
    """How many activations are to be computed again, and how many, or their checkpoints, are to be offloaded."""
    recomputed, offloaded = 0, 0
    for variant in state.variant.flat:
        if variant > 0:
            recomputed += 1
    for parts in state.parts_to_leave.flat:
        if parts > 0:
            offloaded += 1
    return recomputed, offloaded


@compiled_phase
def _op_ms(figures: Figures, state: State, k: int, s: int, j: int) -> float:
    """How long a compute op takes; F, B and W take the same by each variant."""
    return float(figures.ms[state.variant[s, j], k, s, state.column[j]])


@compiled
def listed_ms(figures: Figures, state: State, span: bool) -> float:
    """The makespan of what has been listed, or the longest span of a device."""
    devices, (kinds, stages, microbatches) = len(figures.memory), state.start.shape
    first, last = np.full(devices, np.inf), np.zeros(devices)
    for k in range(kinds):
        for s in range(stages):
            d = figures.device[s]
            for j in range(microbatches):
                if state.start[k, s, j] < np.inf:
                    first[d] = min(first[d], state.start[k, s, j])
                    last[d] = max(last[d], state.start[k, s, j] + _op_ms(figures, state, k, s, j))
    if not span:
        return float(last.max())
    longest = 0.0
    for d in range(devices):
        if first[d] < np.inf:
            longest = max(longest, last[d] - first[d])
    return longest
