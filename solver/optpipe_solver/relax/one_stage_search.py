"""Best-first search over what a device with one stage can do. Compiled; tests compare it with a plain one."""

from __future__ import annotations

from optpipe.evaluate.jit import compiled, compiled_part_in_place
from optpipe_solver.relax.one_stage import OneStage
from optpipe_solver.relax.one_stage_bound import end_bound
from optpipe_solver.relax.one_stage_moves import go_to_next_event, start_op, start_transfer
from optpipe_solver.relax.one_stage_state import (
    FIRST_ACTIVATION,
    IDLE,
    IMPOSSIBLE,
    IN_FLIGHT,
    STARTED,
    WIDTH,
    State,
    bytes_held,
    empty_state,
    has_same_ops,
    is_complete,
)
from optpipe_solver.relax.states import (
    IS_COMPLETE,
    IS_FULL,
    ROWS,
    States,
    add_unless_dominated,
    copy_columns,
    is_over,
    least_bound,
    read_best,
    remove_best,
)


@compiled
def expand(device: OneStage, states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow.

    Activations with equally many parts there are interchangeable. So only one of them is tried: to leave, the one that
    began last; to come back or to have its B, the one that began first. An activation may leave more than once, and
    also after it was computed again: both only make the least end earlier. A BW is B followed at once by W, with the
    least bytes of both.

    A state's bound is at least that of the one before it: after the last B, a state no longer knows the tail.
    After `tally[IS_FULL]` the search must not go on, as the state that had no room is gone.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).
    """
    columns = len(states.must_equal)
    state, computing = empty_state(columns), empty_state(columns)
    sending, following = empty_state(columns), empty_state(columns)
    if states.tally[ROWS] == 0:
        add_unless_dominated(state.row, FIRST_ACTIVATION, False, end_bound(state, device), states)
    for _ in range(pops):
        if is_over(states):
            break
        least = read_best(states, state.row)
        if is_complete(state, device):
            states.tally[IS_COMPLETE] = 1
            break
        remove_best(states)
        if state.row[STARTED] < device.microbatches and int(state.row[IN_FLIGHT]) == len(state.activations):
            states.tally[IS_FULL] = 1
            return least
        _add_successors(state, computing, sending, following, device, states, least)
        if states.tally[IS_FULL]:
            return least
    return least_bound(states)


@compiled_part_in_place
def _add_successors(
    state: State, computing: State, sending: State, following: State, device: OneStage, states: States, least: float
) -> None:
    """Add what follows from a state with each op on compute and each transfer on each line; three states to work on."""
    held = bytes_held(state, device)
    for op in range(6):
        copy_columns(state.row, computing.row)
        with_op = start_op(computing, op, device, held)
        if with_op == IMPOSSIBLE:
            continue
        transfers = 1 + 2 * int(computing.row[IN_FLIGHT])  # none, or of an activation out or back
        for first in range(transfers if device.lines else 1):
            copy_columns(computing.row, sending.row)
            with_first = start_transfer(sending, 0, first, device, with_op)
            if with_first == IMPOSSIBLE:
                continue
            for second in range(transfers if device.lines == 2 else 1):
                copy_columns(sending.row, following.row)
                if start_transfer(following, 1, second, device, with_first) == IMPOSSIBLE:
                    continue
                if not go_to_next_event(following, device):
                    continue
                only_waited = op == IDLE and first + second == 0 and has_same_ops(state, following)
                end = max(least, end_bound(following, device))
                width = FIRST_ACTIVATION + WIDTH * int(following.row[IN_FLIGHT])
                add_unless_dominated(following.row, width, only_waited, end, states)
                if states.tally[IS_FULL]:
                    return
