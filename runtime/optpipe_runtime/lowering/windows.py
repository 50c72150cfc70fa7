"""When the gradients of stages that are sharded over replicas are reduced several times a step (ZeRO-2), so that a rank
holds few whole gradients (Lin et al. 2025, ChronosPipe, section 4.3).

A rank may hold the whole gradients of so many stages. The first backward of one more needs the room of the stage whose
last backward or W lies longest ago: that one is reduced behind this op, at once, and waited for where its room is
needed. In between, the ops of other stages hide it. A stage that comes again begins fresh gradients.

Replicas do this in step if they run the same schedule for the same problem: their reductions then have one order, that
of the program, and every wait is for an op that comes earlier in the common order of all ops (`lowering.actions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from optpipe.model.ops import Op
from optpipe_runtime.lowering.plan import WEIGHT


class Windows(NamedTuple):
    """Of one rank. `ends`: the ops behind which the gradients of their stage leave, and before the stage's last one.
    `room`: for each op that needs the room of another stage's gradients, that stage."""

    ends: frozenset[Op]
    room: Mapping[Op, int]


def windows(ops: Iterable[Op], whole: int) -> Windows:
    """The windows of a rank's ops, in program order, if it may hold `whole` stages' whole gradients."""
    held: dict[int, Op] = {}  # by stage its last op that adds to them; the stage that was used last comes last
    left: dict[int, Op] = {}  # the ops behind which stages left
    ends: set[Op] = set()
    room: dict[Op, int] = {}
    for op in ops:
        if op.kind not in WEIGHT:
            continue
        s = op.stage
        if s in left:
            ends.add(left.pop(s))
        if s not in held and len(held) == whole:
            oldest = next(iter(held))
            left[oldest] = held.pop(oldest)
            room[op] = oldest
        held.pop(s, None)
        held[s] = op
    return Windows(frozenset(ends), room)
