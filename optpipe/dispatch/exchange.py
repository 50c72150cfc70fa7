"""The compiled part of `optpipe.steps.assign`: micro-batches change places while the slowest replica becomes faster."""

from __future__ import annotations

import numpy as np

from optpipe.dispatch.clock import list_ops, listed_ms
from optpipe.dispatch.descend import RANDOM, below, draw, move
from optpipe.dispatch.figures import Figures
from optpipe.dispatch.state import State
from optpipe.evaluate.jit import compiled, compiled_part
from optpipe.model.arrays import Floats, Ints
from optpipe.model.rules import Rules

TOLERANCE = 1e-9  # a replica is shorter only by more than rounding


@compiled
def exchange(
    figures: Figures, like: Rules, state: State, order: Ints, counts: Ints, ms: Floats, tries: int, free: bool
) -> None:
    """Try a number of changes of the slowest replica: one of its micro-batches changes places within it, with one of
    another replica, or moves there.

    Parameters
    ----------
    like
        Rules of a replica, with what becomes of each stage's activations in the first column of `leaves`; their order
        is not read.
    state
        Room for `list_ops`.
    order
        (R, most) the micro-batches of each replica in the order in which they enter, then anything; changed.
    counts
        (R,) how many each replica has; changed where `free`.
    ms
        (R,) becomes how long each replica takes.
    free
        Whether replicas may have other numbers of micro-batches.
    """
    replicas, most = order.shape
    for r in range(replicas):
        ms[r] = _replica_ms(figures, like, state, order[r], counts[r], np.inf)
    random = np.ones(RANDOM + 1)  # as a descent's progress
    mine, others = np.zeros(most, np.int64), np.zeros(most, np.int64)
    for _ in range(tries):
        slowest = int(ms.argmax())
        n = counts[slowest]
        mine[:n] = order[slowest, :n]
        other = below(replicas, random)
        rival = below(replicas, random)  # of two replicas the faster one
        if ms[rival] < ms[other]:
            other = rival
        if other == slowest or draw(random) < 0.3:
            move(mine, below(n, random), below(n, random), draw(random) < 0.5)
            changed = _replica_ms(figures, like, state, mine, n, ms[slowest])
            if changed < ms[slowest] * (1 - TOLERANCE):
                order[slowest, :n], ms[slowest] = mine[:n], changed
            continue
        k = counts[other]
        others[:k] = order[other, :k]
        a = below(n, random)
        new_n, new_k = n, k
        if free and n > 1 and k < most and draw(random) < 0.4:
            others[k] = mine[a]
            new_n, new_k = n - 1, k + 1
            mine[a:new_n] = order[slowest, a + 1 : n]
            move(others, k, below(new_k, random), False)
        else:
            b = below(k, random)
            mine[a], others[b] = others[b], mine[a]
            if draw(random) < 0.3:
                move(mine, a, below(n, random), False)
            if draw(random) < 0.3:
                move(others, b, below(k, random), False)
        mine_ms = _replica_ms(figures, like, state, mine, new_n, ms[slowest])
        if mine_ms >= ms[slowest] * (1 - TOLERANCE):
            continue
        others_ms = _replica_ms(figures, like, state, others, new_k, ms[slowest])
        if others_ms < ms[slowest] * (1 - TOLERANCE):
            order[slowest, :new_n], order[other, :new_k] = mine[:new_n], others[:new_k]
            counts[slowest], counts[other] = new_n, new_k
            ms[slowest], ms[other] = mine_ms, others_ms


@compiled_part
def _replica_ms(figures: Figures, like: Rules, state: State, order: Ints, n: int, stop_ms: float) -> float:
    """How long the first n micro-batches of an order take by the rules; infinite where that is more than `stop_ms`, or
    they do not fit."""
    leaves = np.empty((len(like.in_flight), n), np.int64)
    for s in range(len(leaves)):
        for j in range(n):
            leaves[s, j] = like.leaves[s, 0]
    rules = Rules(like.in_flight, like.wait_ms, leaves, like.lead_ms, order)
    if list_ops(figures, rules, state, stop_ms):
        return float(listed_ms(figures, state, False))
    return float(np.inf)
