"""Lower bounds on a schedule's length from each device alone: what comes before its ops, what they take, what follows.

A device computes one op at a time. So for any set of its ops, a schedule takes at least the least time before one of
them, the time of all, and the least time after one of them (Carlier 1982, "The one-machine sequencing problem").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.paths import Pass, Paths, shortest_paths


class Ops(NamedTuple):
    """All ops of one kind and stage of equal micro-batches: ms of all together, and at least before and after each."""

    ms: float
    before: float
    after: float


def one_machine_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule of the problem falls below, whatever the memory.

    Makespan: what comes before and after an op is on any device. Span (OptPipe Eq. 3): it is between the first op of
    the op's device and its last one. Where all micro-batches enter on one device, that device starts at 0, so its span
    is its end, and waits for the last input gradient of every other one.
    """
    paths = shortest_paths(problem)

    def ops(at: Pass, begin: float, after: float) -> list[Ops]:
        """Of one pass: forwards, input gradients, weight gradients; `after` input gradients."""
        j, s = at
        forward, backward, weight = (float(paths.ms[j][kind, s]) for kind in (Kind.F, Kind.B, Kind.W))
        count, arrives, trip = paths.passing[j], paths.reaches[at] - begin, paths.round_trip[at]
        return [
            Ops(count * forward, arrives, trip - forward + after),
            Ops(count * backward, arrives + trip - backward, after),
            Ops(count * weight, arrives + trip, 0.0),
        ]

    longest = 0.0
    for each in filter(None, paths.passes):
        if objective == "makespan":
            longest = max(longest, _longest([op for at in each for op in ops(at, 0.0, paths.after[at])]))
            continue
        first = {j: (j, s) for j, s in sorted(each, key=lambda at: -paths.reaches[at])}  # of each class
        between = [op for at in each for op in ops(at, paths.reaches[first[at[0]]], _to_last_op(at, first, paths))]
        longest = max(longest, _longest(between))
        if paths.one_entry:
            entry = [op for at in each for op in ops(at, 0.0, paths.back[at])[:2]]
            longest = max(longest, _longest(entry))
    return longest


def _to_last_op(at: Pass, first: Mapping[int, Pass], paths: Paths) -> float:
    """Return the least ms from an input gradient's end to the end of its device's last op: its own weight gradient, or
    the way back to the first pass of the device, and the weight gradient there."""
    j, s = at
    ms, start = paths.ms[j], first[j]
    ends, returns = (paths.reaches[each] + paths.round_trip[each] for each in (at, start))
    return float(max(ms[Kind.W, s], returns - ends + ms[Kind.W, start[1]]))


def _longest(ops: list[Ops]) -> float:
    """Return the largest bound of all sets of these ops.

    The best set has all ops with at least so much before and at least so much after.
    """
    ms, before, after = np.array(sorted(ops, key=lambda op: -op.after)).T
    chosen = before >= before[:, None]  # (least before, op)
    bounds = before[:, None] + np.cumsum(ms * chosen, axis=1) + after
    return float(bounds[chosen].max())
