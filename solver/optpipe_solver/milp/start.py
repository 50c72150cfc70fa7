"""A schedule as a start for the search: the value of each binary in it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optpipe.model.ops import Kind, Op
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.milp.precedences import compute_ops, microbatches_by_route
from optpipe_solver.milp.rows import Literal
from optpipe_solver.milp.schedule_graph import Activation
from optpipe_solver.milp.variables import Variables

Interval = tuple[float, float]
NEVER = (math.inf, math.inf)


def assignment(v: Variables, schedule: Schedule) -> dict[int, float]:
    """The values of the binaries, by variable, in a schedule. They contradict each other if the model cannot express
    the schedule; the solver then drops them."""
    return {
        literal.var: float(literal.positive == truth) for literal, truth in _truths(v, schedule) if literal.var >= 0
    }


def _truths(v: Variables, schedule: Schedule) -> Iterator[tuple[Literal, bool]]:
    timeline = schedule.timeline
    rows = zip(timeline.table.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True)
    at = {Op(Kind(row[KIND]), row[STAGE], row[MICROBATCH], row[PART]): (start, end) for row, start, end in rows}
    run = _compute_times(v, at)
    ops = v.paths.ops
    for (x, y), P in v.P.items():
        yield P, run[ops[x]] < run[ops[y]]

    moved = _transfers(v, at, run)
    made = {a for a in v.activations if _moved(v, at, Kind.O, a)}
    for a in v.activations:
        yield v.W[a], a in made
    for orders, first, second in (
        (v.K, Kind.O, Kind.O),
        (v.L, Kind.R, Kind.R),
        (v.H, Kind.O, Kind.R),
    ):
        for (a, b), literal in orders.items():
            before, after = moved[first, a], moved[second, b]
            if before is not None and after is not None and (a < b or orders is v.H):
                yield literal, before <= after
                if orders is not v.H:
                    yield orders[b, a], before > after

    def moves(kind: Kind, a: Activation) -> Interval:
        return moved[kind, a] or NEVER if a in made else NEVER

    for (a, y), M in v.M.items():
        yield M, moves(Kind.O, a)[1] <= run[ops[y]][0]
    for (a, y), N in v.N.items():
        yield N, moves(Kind.R, a)[0] < run[ops[y]][1]
    for (c, b), X in v.X.items():
        begin = moves(Kind.R, b)[0]
        allocates = min(
            (run[ops[y]][0] for (a, y) in v.N if a == b and run[ops[y]][0] < begin < run[ops[y]][1]),
            default=begin,
        )
        yield X, b in made and moves(Kind.O, c)[1] <= allocates and begin < moves(Kind.R, c)[0] < math.inf


def _transfers(
    v: Variables, at: dict[Op, Interval], run: dict[Op, Interval]
) -> dict[tuple[Kind, Activation], Interval | None]:
    """From when to when each offload and reload runs; None where the solver decides. One that is not made takes no time
    and lies between two transfers, as early as those before it allow."""
    link, half_duplex = v.costs.link[v.costs.device], v.problem.transfer_mode == "half_duplex"
    moved = {(kind, a): _moved(v, at, kind, a) for kind in (Kind.O, Kind.R) for a in v.activations}
    for a in sorted(v.activations):
        if moved[Kind.O, a] or v.keeps_place(a):
            continue
        moment = run[Op(Kind.F, *a)][1]
        for kind in (Kind.O, Kind.R):
            before = [moved[kind, b] for b in v.activations if v.in_order(b, a)]
            moment = max([moment, *(interval[1] for interval in before if interval)])
            rivals = (x for (k, b), x in moved.items() if x and link[b[0]] == link[a[0]] and (half_duplex or k == kind))
            for begin, end in sorted(rivals):
                if begin < moment < end:
                    moment = end
            moved[kind, a] = moment, moment
    return moved


def _moved(v: Variables, at: dict[Op, Interval], kind: Kind, a: Activation) -> Interval | None:
    """From the first part's start to the last one's end; None unless all parts move, as the model moves whole
    activations."""
    parts = [Op(kind, *a, part) for part in range(v.problem.stages[a[0]].offload_parts)]
    if not all(part in at for part in parts):
        return None
    starts, ends = zip(*(at[part] for part in parts), strict=True)
    return min(starts), max(ends)


def _compute_times(v: Variables, at: dict[Op, Interval]) -> dict[Op, Interval]:
    """Start and end of every F, B and W. A BW is a B followed by its W; Ws are numbered as their Bs, with a fixed order
    everything is. In a window all keep their numbers, as what surrounds it has them, too."""
    ms, times = v.costs.ms, {}
    for op in compute_ops(v.problem):
        fused = at.get(Op(Kind.BW, op.stage, op.microbatch))
        if fused is None or op.kind == Kind.F:
            times[op] = at[op]
        else:
            middle = fused[0] + float(ms[Kind.B, op.stage])
            times[op] = (fused[0], middle) if op.kind == Kind.B else (middle, fused[1])
    for route, batches in microbatches_by_route(v.problem).items() if v.around is None else ():
        for s in route:
            F, B, W = ([Op(kind, s, j) for j in batches] for kind in (Kind.F, Kind.B, Kind.W))
            if v.order != "stages":
                W = [w for _, w in sorted(zip((times[b] for b in B), W, strict=True))]
            for own in (F, B, W) if v.order == "stages" else (W,):
                times |= dict(zip(own, sorted(times[op] for op in own), strict=True))
    return times
