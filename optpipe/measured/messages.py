"""The time of messages, how far clocks are apart, and whether the stages can be where the files place them.

A message from stage s to s + 1 takes at most the time from the end of s's forward to the start of s + 1's; the gradient
that comes back gives the same for the other way. In the sum of the two the difference between two devices' clocks
cancels out, so half the sum of the shortest gaps of a step is the time of a message, and half their difference is how
far the clocks are apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from optpipe.measured.recording import MeasuredOp
from optpipe.model.ops import BACKWARD, Kind, Op

# Of a forward: so much may a neighbour's op begin too early, as times of events and hosts are not exact.
TOLERANCE = 0.25


class Gap(NamedTuple):
    """Between stage `stage` and the next one in a step: the shortest time from the end of an op to the start of the op
    that waits for it, in ms. Each is off by the difference of the two clocks."""

    stage: int
    forward_ms: float
    backward_ms: float
    same_device: bool

    @property
    def message_ms(self) -> float:
        """What a message takes; below 0 where ops did not wait for each other."""
        return (self.forward_ms + self.backward_ms) / 2

    @property
    def ahead_ms(self) -> float:
        """How far the clock of the later stage is ahead."""
        return (self.forward_ms - self.backward_ms) / 2


def gaps(step: Iterable[MeasuredOp]) -> list[Gap]:
    """Of each stage and the next: the shortest gaps forward and back in a step. None where a start is missing."""
    at = {each.op: each for each in step}
    forward: dict[int, float] = defaultdict(lambda: inf)
    backward: dict[int, float] = defaultdict(lambda: inf)
    for op, ran in at.items():
        s, j = op.stage, op.microbatch
        if op.kind is Kind.F:
            shortest, key, waiting = forward, s, at.get(Op(Kind.F, s + 1, j))
        elif op.kind in BACKWARD:
            shortest, key = backward, s - 1
            waiting = at.get(Op(Kind.BW, s - 1, j)) or at.get(Op(Kind.B, s - 1, j))
        else:
            continue
        if waiting and waiting.start_ms is not None and ran.start_ms is not None:
            shortest[key] = min(shortest[key], waiting.start_ms - ran.end_ms)
    device = {op.stage: ran.device for op, ran in at.items()}
    return [
        Gap(s, forward[s], backward[s], device[s] == device[s + 1]) for s in sorted(forward.keys() & backward.keys())
    ]


def _gaps_by_stage(steps: Iterable[Sequence[MeasuredOp]]) -> list[tuple[int, list[Gap]]]:
    """By stage, in their order, the gaps of all steps."""
    by_stage: dict[int, list[Gap]] = defaultdict(list)
    for step in steps:
        for gap in gaps(step):
            by_stage[gap.stage].append(gap)
    return sorted(by_stage.items())


def impossible(steps: Sequence[Sequence[MeasuredOp]]) -> str | None:
    """Why the ops cannot have run like this whatever the clocks: a stage that did not wait for its neighbour."""
    forward_ms = median([each.ms for step in steps for each in step if each.op.kind is Kind.F] or [0.0])
    for s, of_stage in _gaps_by_stage(steps):
        early_ms = -median(
            min(gap.forward_ms, gap.backward_ms) if gap.same_device else gap.message_ms for gap in of_stage
        )
        if early_ms > TOLERANCE * forward_ms:
            return f"stages {s} and {s + 1} do not wait for each other: one begins {early_ms:.3g} ms too early"
    return None


def clocks_ahead(steps: Iterable[Sequence[MeasuredOp]], where: Sequence[int]) -> dict[int, float]:
    """By device, how far its clock is ahead of that of stage 0's device, in ms; without devices that exchange no
    messages. `where` has the device of each stage."""
    ahead = {where[0]: 0.0}
    for s, of_stage in _gaps_by_stage(steps):
        if where[s] in ahead and where[s + 1] not in ahead:
            differences = median(0.0 if gap.same_device else gap.ahead_ms for gap in of_stage)
            ahead[where[s + 1]] = ahead[where[s]] + differences
    return ahead
