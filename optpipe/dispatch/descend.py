"""One descent in rules, on plain arrays and compiled: change some, simulate, keep what is not much longer."""

from __future__ import annotations

from typing import Any

import numpy as np

from optpipe.dispatch.clock import AGAIN, listed_ms, listed_ops
from optpipe.dispatch.starts import evenly
from optpipe.evaluate.jit import compiled
from optpipe.evaluate.objective import shorter
from optpipe.model.arrays import Flags, Floats, Ints

SLACK = 0.001  # about so much longer than the rules at hand new ones may be (threshold accepting, Dueck 1990)
MODULUS = 2.0**31 - 1  # of the random numbers, whose state is at least 1 and below this
MS, SHORTEST, FAILURES, RANDOM = range(4)  # columns of a descent's state

Fixed = tuple[Any, ...]  # the arguments of `list_ops` that are no rules
Arrays = tuple[Ints, Floats, Ints, Floats]  # of `Rules`: in_flight, wait_ms, leaves, lead_ms

_list_ops, _length_ms = listed_ops.compiled_now(), listed_ms.compiled_now()
_evenly, _shorter = compiled(evenly), compiled(shorter)


@compiled
def _draw(state: Floats) -> float:
    """The next random number between 0 and 1 (Park and Miller 1988, with the factor of 1993): the same whether compiled
    or not."""
    state[RANDOM] = (48_271.0 * state[RANDOM]) % MODULUS
    return float(state[RANDOM] / MODULUS)


@compiled
def _below(n: int, state: Floats) -> int:
    """A random number of 0, 1, ..., n - 1."""
    return int(n * _draw(state))


@compiled
def _exponential(state: Floats) -> float:
    """A random number with the mean 1."""
    return float(-np.log(1.0 - _draw(state)))


@compiled
def _relieve(
    rules: Arrays, chosen: Flags, sends: bool, parts: Ints, again: Flags, carry_ms: Floats, state: Floats
) -> None:
    """Let the chosen stages' activations come back sooner or later, let others of them leave or be computed again, or
    let some of them one after the other do or not do so."""
    _, _, leaves, lead_ms = rules
    (stages, m), what = leaves.shape, _draw(state)
    if what < 0.2:
        factor = (0.0, 1.0, 1.5, 4.0 * _draw(state))[_below(4, state)]
        for s in range(stages):
            if chosen[s]:
                lead_ms[s] = factor * carry_ms[s]
    elif what < 0.4:
        share, eighths = _draw(state), (1.0 + _below(7, state)) / 8.0
        share = (0.0, 1.0, share, eighths)[_below(4, state)]
        phase = _draw(state)
        for s in range(stages):
            if chosen[s]:
                most = parts[s] if sends else int(again[s])
                for j in range(m):
                    count = int(_evenly(share * most, phase, j))
                    leaves[s, j] = count if sends else AGAIN * count
    elif what < 0.6:  # another micro-batch instead
        j, step = _below(m, state), 2 * _below(2, state) - 1
        if 0 <= j + step < m:
            for s in range(stages):
                if chosen[s]:
                    leaves[s, j], leaves[s, j + step] = leaves[s, j + step], leaves[s, j]
    else:
        first = _below(m, state)
        end = min(m, first + 1 + int(_exponential(state)))
        for s in range(stages):
            value = _below(parts[s] + 1, state) if sends else AGAIN * _below(int(again[s]) + 1, state)
            if chosen[s]:
                leaves[s, first:end] = value


@compiled
def change(
    rules: Arrays,
    ms: Floats,
    device: Ints,
    devices: int,
    parts: Ints,
    again: Flags,
    visits: Ints,
    carry_ms: Floats,
    state: Floats,
) -> None:
    """Change rules of some devices in a row: at one stage of each or at all, what is in flight, how long is waited, or
    what leaves and when it comes back; or what one stage has in flight more, another has less."""
    in_flight, wait_ms, leaves, _ = rules
    stages, m = leaves.shape
    chunks, can_leave, can_recompute = int(visits.max()) + 1, parts.max() > 0, again.any()
    chosen = np.zeros(stages, dtype=np.bool_)
    while True:
        begin = _below(devices, state)
        end = begin + 1 + int(_exponential(state) * devices / 4.0)
        if _draw(state) < 0.15:
            begin, end = 0, devices
        # Which stage of each device, and which other one; -1 is all of them, or none.
        at, other = _below(chunks + 1, state) - 1, _below(chunks + 1, state) - 1
        for s in range(stages):
            chosen[s] = begin <= device[s] < end and (at < 0 or visits[s] == at)
        if (can_leave or can_recompute) and _draw(state) < 0.6:
            sends = _draw(state) < 0.5 if can_leave and can_recompute else can_leave
            _relieve(rules, chosen, sends, parts, again, carry_ms, state)
        elif _draw(state) < 0.5:
            step = 2 * _below(2, state) - 1
            for s in range(stages):
                if chosen[s]:
                    in_flight[s] += step
                if -1 < at != other and begin <= device[s] < end and visits[s] == other:
                    in_flight[s] -= step
                in_flight[s] = min(max(in_flight[s], 1), m)
        else:
            kind, share = _below(2, state), _draw(state)
            share = (0.0, 0.3 * share, share)[_below(3, state)]
            for s in range(stages):
                if chosen[s]:
                    wait_ms[kind, s] = share * ms[kind, s]
        if _draw(state) < 0.7:
            return


@compiled
def descend(
    fixed: Fixed,
    parts: Ints,
    again: Flags,
    visits: Ints,
    carry_ms: Floats,
    rules: Arrays,
    best: Arrays,
    trial: Arrays,
    start: Floats,
    moved: Floats,
    state: Floats,
    tries: int,
    span: bool,
) -> None:
    """Try so many changes.

    Parameters
    ----------
    fixed
        The first arguments of `list_ops`, which are no rules.
    parts, again, visits, carry_ms
        As in `Simulator`, `again` for `can_recompute`.
    rules, best, trial
        The rules at hand, the best of this descent, and room for others; all are changed.
    start, moved
        Room for what `list_ops` fills.
    state
        (4,) the length in ms by the rules at hand and by the best, how many changes in a row have led to nothing
        shorter than that, and the state of the random numbers; all are changed.
    """
    ms, device, devices = fixed[0], fixed[1], len(fixed[7])
    ops = 3 * rules[2].size
    for _ in range(tries):
        trial[0][:], trial[1][:], trial[2][:], trial[3][:] = rules
        change(trial, ms, device, devices, parts, again, visits, carry_ms, state)
        most = state[MS] * (1.0 + _exponential(state) * SLACK)
        stop_ms = np.inf if span else most
        done = _list_ops(*fixed, *trial, stop_ms, start, moved)
        complete = done == ops + (trial[2] < 0).sum()  # with what is recomputed
        found = _length_ms(ms, device, devices, start, span) if complete else np.inf
        state[FAILURES] += 1.0
        if _shorter(found, state[SHORTEST]):
            state[SHORTEST], state[FAILURES] = found, 0.0
            best[0][:], best[1][:], best[2][:], best[3][:] = trial
        if found <= most:
            state[MS] = found
            rules[0][:], rules[1][:], rules[2][:], rules[3][:] = trial
