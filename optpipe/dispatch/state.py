"""Where the list scheduler is: all that changes while it runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.dispatch.figures import Figures
from optpipe.evaluate.jit import compiled_part
from optpipe.model.arrays import NONE, Flags, Floats, Ints
from optpipe.model.rules import Rules

FORWARD, BACKWARD, WEIGHT, RECOMPUTE, OFFLOAD, RELOAD = range(6)  # rows by kind of op, of a part's O and R
OUT, BACK = range(2)  # rows by way of a transfer
WAY, STAGE, MICROBATCH = range(3)  # columns of `State.carried`


class State(NamedTuple):
    """Where the list scheduler is. S stages, m micro-batches, D devices.

    Attributes
    ----------
    start
        (4, S, m) when each compute op has started; infinity if it has not.
    moved
        (2, S, m, parts) when each transfer of a part has started; infinity if it has not.
    input_ready
        (4, S, m) when the input of an op is there; infinity if that is open.
    activation_ready
        (S, m) when all of an activation, or of its checkpoint, is on the device; infinity while it is away.
    computed_again
        (S, m) when the recompute of an activation ends; infinity until it starts, 0 where there is none.
    next_microbatch
        (4, S) of each kind of op: none before it is to start.
    in_flight
        (S,) micro-batches between the start of their F and that of their B.
    begin
        (m,) the latest begin with which the micro-batch, at full speed, would be where it is now; its later ops are
        expected at `begin + Figures.offset_ms`.
    forwards_left
        (D,) forwards that have not started.
    work_left
        (D,) how long each device takes for the F, B and W that have not started.
    held, hosted
        (D,) bytes on each device, and of each device in host memory.
    frees, frees_on_host
        (D,) bytes that go when the running op ends: its own, and of parts that have left meanwhile.
    running
        (D,) whether an op runs.
    free_at
        (D,) when the last op ends or ended.
    look_at
        (links + D,) when a link or a device is looked at next; infinity if only others can make that necessary.
    parts_to_leave, parts_sent, parts_off_device, parts_back
        (S, m) how many parts of an activation, or of its checkpoint, are to leave, have begun to leave, have left, have
        begun to come back. Where no more parts shall leave, the first is lowered to the second.
    variant
        (S, m) 0, or 1 + the level by which an activation is computed again.
    next_to_leave, next_to_return
        (S,) the oldest micro-batch with parts that are to leave, to come back.
    carried
        (links, 3) way, stage and micro-batch of the part on each link; NONE where a link is free.
    link_free_at
        (links,) when the last transfer ends or ended.
    column
        (m,) in which column the figures of each micro-batch stand.

    Micro-batches are numbered in the order in which they enter.
    """

    start: Floats
    moved: Floats
    input_ready: Floats
    activation_ready: Floats
    computed_again: Floats
    next_microbatch: Ints
    in_flight: Ints
    begin: Floats
    forwards_left: Ints
    work_left: Floats
    held: Ints
    hosted: Ints
    frees: Ints
    frees_on_host: Ints
    running: Flags
    free_at: Floats
    look_at: Floats
    parts_to_leave: Ints
    parts_sent: Ints
    parts_off_device: Ints
    parts_back: Ints
    variant: Ints
    next_to_leave: Ints
    next_to_return: Ints
    carried: Ints
    link_free_at: Floats
    column: Ints


def new_state(figures: Figures, microbatches: int) -> State:
    """Returns room for `list_ops`, which can be used again and again."""
    _, stages, parts, _ = figures.part_bytes.shape
    devices, links = len(figures.memory), len(figures.stages_on_link)

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return State(
        start=np.zeros((4, stages, microbatches)),
        moved=np.zeros((2, stages, microbatches, parts)),
        input_ready=np.zeros((4, stages, microbatches)),
        activation_ready=np.zeros((stages, microbatches)),
        computed_again=np.zeros((stages, microbatches)),
        next_microbatch=ints(4, stages),
        in_flight=ints(stages),
        begin=np.zeros(microbatches),
        forwards_left=ints(devices),
        work_left=np.zeros(devices),
        held=ints(devices),
        hosted=ints(devices),
        frees=ints(devices),
        frees_on_host=ints(devices),
        running=np.zeros(devices, dtype=np.bool_),
        free_at=np.zeros(devices),
        look_at=np.zeros(links + devices),
        parts_to_leave=ints(stages, microbatches),
        parts_sent=ints(stages, microbatches),
        parts_off_device=ints(stages, microbatches),
        parts_back=ints(stages, microbatches),
        variant=ints(stages, microbatches),
        next_to_leave=ints(stages),
        next_to_return=ints(stages),
        carried=ints(links, 3),
        link_free_at=np.zeros(links),
        column=ints(microbatches),
    )


@compiled_part
def reset(figures: Figures, rules: Rules, state: State) -> None:
    """Empty devices and links, all forwards of first stages ready."""
    state.start[:] = np.inf
    state.moved[:] = np.inf
    state.input_ready[:] = np.inf
    state.activation_ready[:] = 0.0
    state.computed_again[:] = 0.0
    state.next_microbatch[:] = 0
    state.in_flight[:] = 0
    state.begin[:] = 0.0
    state.forwards_left[:] = 0
    state.held[:] = 0
    state.hosted[:] = 0
    state.frees[:] = 0
    state.frees_on_host[:] = 0
    state.running[:] = False
    state.free_at[:] = 0.0
    state.look_at[:] = 0.0
    state.look_at[: len(figures.stages_on_link)] = np.inf
    state.variant[:] = 0
    state.parts_to_leave[:] = 0
    state.parts_sent[:] = 0
    state.parts_off_device[:] = 0
    state.parts_back[:] = 0
    state.next_to_leave[:] = 0
    state.next_to_return[:] = 0
    state.carried[:] = NONE
    state.link_free_at[:] = 0.0
    state.work_left[:] = 0.0
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
            if state.variant[s, j] > 0:
                state.computed_again[s, j] = np.inf


@compiled_part
def needed_ms(figures: Figures, state: State, s: int, j: int) -> float:
    """When what has left is expected to be needed: by the backward, or by the recompute before it."""
    column, variant = state.column[j], state.variant[s, j]
    needed = state.begin[j] + figures.offset_ms[BACKWARD, s, column]
    if variant > 0:
        needed -= figures.ms[variant, RECOMPUTE, s, column]
    return float(needed)


@compiled_part
def look_soon(state: State, place: int, moment: float) -> None:
    """Look at a link or device no later than at a moment."""
    state.look_at[place] = min(state.look_at[place], moment)
