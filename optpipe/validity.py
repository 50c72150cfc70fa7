"""`check`: everything that is wrong with a schedule for a problem, one sentence each. An empty list: it runs, and it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.graph import Flags, Table, Where, describe, flatten, require_known
from optpipe.memory import certify
from optpipe.ops import BACKWARD, Kind
from optpipe.problem import Problem
from optpipe.program import JOINED, KIND, MICROBATCH
from optpipe.timeline import simulate

if TYPE_CHECKING:
    from optpipe.schedule import Schedule

MOST = 20  # sentences of one sort; a broken schedule of 200,000 ops is not listed in full


def check(problem: Problem, schedule: Schedule) -> list[str]:
    """Validates the programs, simulates them and certifies their memory; returns what is wrong."""
    table, device = flatten(schedule)
    try:
        if len(schedule.programs) != len(problem.devices):
            raise ScheduleError(f"there are {len(schedule.programs)} programs: the problem has {len(problem.devices)} devices")
        require_known(problem, table, device)
    except ScheduleError as error:
        return [str(error)]
    wrong = [
        *_twice(table),
        *_missing(problem, table),
        *_out_of_order(problem, table),
        *_bad_pairs(table),
        *_unknown_links(problem, schedule),
    ]
    if wrong:
        return wrong
    try:
        simulate(problem, schedule)
    except ScheduleError as error:
        wrong.append(str(error))
    return wrong + certify(problem, schedule).complaints()


def _twice(table: Table) -> list[str]:
    _, first, count = np.unique(table[:, :4], axis=0, return_index=True, return_counts=True)
    return [f"{describe(table[i])} stands {n} times" for i, n in zip(first[count > 1][:MOST], count[count > 1], strict=False)]


def _missing(problem: Problem, table: Table) -> list[str]:
    """Each micro-batch passes each stage of its route: one F, and B and W, or BW; O, D and R all or none; no C beside O."""
    costs, where = problem.costs, Where(problem, table)
    passes = (costs.before[costs.route] != -2).T  # (S, m)
    has = {kind: where.of(kind) >= 0 for kind in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C)}
    offload, drop, reload = (where.of_part(kind) >= 0 for kind in (Kind.O, Kind.D, Kind.R))

    def name(found: Flags, text: str) -> list[str]:
        return [text.format(*(int(x) for x in place)) for place in np.argwhere(found)[:MOST]]

    return [
        *name(passes & ~has[Kind.F], "{0}F{1} is missing"),
        *name(passes & ~has[Kind.B] & ~has[Kind.BW], "stage {0}, micro-batch {1} has no backward: {0}B{1} and {0}W{1}, or {0}BW{1}"),
        *name(has[Kind.B] & has[Kind.BW], "{0}B{1} and {0}BW{1}: the backward is either split or fused"),
        *name(has[Kind.B] & ~has[Kind.W], "{0}B{1} has no {0}W{1}"),
        *name(has[Kind.W] & ~has[Kind.B], "{0}W{1} has no {0}B{1}"),
        *name(offload & ~drop, "{0}O{1}.{2} has no drop: its device copy is never let go"),
        *name(offload & ~reload, "{0}O{1}.{2} has no reload: the backward misses its bytes"),
        *name(drop & ~offload, "{0}D{1}.{2} has no offload before it"),
        *name(reload & ~offload, "{0}R{1}.{2} has no offload before it"),
        *name(has[Kind.C] & offload.any(axis=2), "{0}C{1}: an activation is offloaded or recomputed, not both"),
    ]


def _out_of_order(problem: Problem, table: Table) -> list[str]:
    """In each program F stands before O, D, R, C and these before B, B before W."""
    where = Where(problem, table)
    before_backward = np.maximum(where.of(Kind.R), where.of(Kind.C))
    forward, backward, weight = where.of(Kind.F), where.of(Kind.B, Kind.BW), where.of(Kind.W)
    parts = [where.of_part(kind) for kind in (Kind.O, Kind.D, Kind.R)]
    steps = [
        (forward, where.of(Kind.C)),
        (forward, backward),
        (before_backward, backward),
        (backward, weight),
        (np.broadcast_to(forward[:, :, None], parts[0].shape), parts[0]),
        (parts[0], parts[1]),
        (parts[1], parts[2]),
    ]
    wrong = []
    for first, second in steps:
        swapped = (first >= 0) & (second >= 0) & (first > second)
        wrong += [
            f"{describe(table[a])} stands after {describe(table[b])}" for a, b in zip(first[swapped][:MOST], second[swapped], strict=False)
        ]
    return wrong


def _bad_pairs(table: Table) -> list[str]:
    wrong = []
    for i in np.flatnonzero(table[:, JOINED] == 1):
        pair = table[i : i + 2]
        forwards, backwards = pair[:, KIND] == Kind.F, np.isin(pair[:, KIND], list(BACKWARD))
        if not (forwards.sum() == 1 and backwards.sum() == 1 and pair[0, MICROBATCH] != pair[1, MICROBATCH]):
            wrong.append(f"{describe(pair[0])}+{describe(pair[1])}: only a forward and a backward of another micro-batch run together")
    return wrong[:MOST]


def _unknown_links(problem: Problem, schedule: Schedule) -> list[str]:
    return [f"links[{link!r}]: no two devices share such a link" for link in schedule.links if link not in problem.shared_links]
