"""A schedule as a start for the search: what each binary of a model is in it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optpipe.model.ops import Kind, Op
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.milp.frame import Activation
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.rows import Literal
from optpipe_solver.milp.windows import compute_ops, passing

Interval = tuple[float, float]
NEVER = (math.inf, math.inf)


def assignment(model: Model, schedule: Schedule) -> dict[int, float]:
    """Values of the binaries by variable. What the model cannot express makes them contradict each other; the solver
    then drops them."""
    return {
        literal.var: float(literal.positive == truth) for literal, truth in _truths(model, schedule) if literal.var >= 0
    }


def _truths(model: Model, schedule: Schedule) -> Iterator[tuple[Literal, bool]]:
    timeline = schedule.timeline
    rows = zip(timeline.table.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True)
    at = {Op(Kind(row[KIND]), row[STAGE], row[MICROBATCH], row[PART]): (start, end) for row, start, end in rows}
    run = _compute_times(model, at)
    ops, offload = model.windows.ops, model.offload
    for (x, y), P in model.P.items():
        yield P, run[ops[x]] < run[ops[y]]

    moved = _transfers(model, at, run)
    made = {a for a in offload.activations if _moved(model, at, Kind.O, a)}
    for a in offload.activations:
        yield offload.W[a], a in made
    for orders, first, second in (
        (offload.K, Kind.O, Kind.O),
        (offload.L, Kind.R, Kind.R),
        (offload.H, Kind.O, Kind.R),
    ):
        for (a, b), literal in orders.items():
            before, after = moved[first, a], moved[second, b]
            if before is not None and after is not None and (a < b or orders is offload.H):
                yield literal, before <= after
                if orders is not offload.H:
                    yield orders[b, a], before > after

    def moves(kind: Kind, a: Activation) -> Interval:
        return moved[kind, a] or NEVER if a in made else NEVER

    for (a, y), M in offload.M.items():
        yield M, moves(Kind.O, a)[1] <= run[ops[y]][0]
    for (a, y), N in offload.N.items():
        yield N, moves(Kind.R, a)[0] < run[ops[y]][1]
    for (c, b), X in offload.X.items():
        begin = moves(Kind.R, b)[0]
        stands = min(
            (run[ops[y]][0] for (a, y) in offload.N if a == b and run[ops[y]][0] < begin < run[ops[y]][1]),
            default=begin,
        )
        yield X, b in made and moves(Kind.O, c)[1] <= stands and begin < moves(Kind.R, c)[0] < math.inf


def _transfers(
    model: Model, at: dict[Op, Interval], run: dict[Op, Interval]
) -> dict[tuple[Kind, Activation], Interval | None]:
    """From when to when each offload and reload runs. One that is not made takes no time and stands where it is in
    nobody's way: as early as those before it let it, between two transfers; None where the solver finds its place."""
    offload, costs = model.offload, model.problem.costs
    link, half_duplex = costs.link[costs.device], model.problem.transfer_mode == "half_duplex"
    moved = {(kind, a): _moved(model, at, kind, a) for kind in (Kind.O, Kind.R) for a in offload.activations}
    for a in sorted(offload.activations):
        if moved[Kind.O, a] or offload.keeps_place(a):
            continue
        moment = run[Op(Kind.F, *a)][1]
        for kind in (Kind.O, Kind.R):
            before = [moved[kind, b] for b in offload.activations if offload.in_order(b, a)]
            moment = max([moment, *(interval[1] for interval in before if interval)])
            rivals = (x for (k, b), x in moved.items() if x and link[b[0]] == link[a[0]] and (half_duplex or k == kind))
            for begin, end in sorted(rivals):
                if begin < moment < end:
                    moment = end
            moved[kind, a] = moment, moment
    return moved


def _moved(model: Model, at: dict[Op, Interval], kind: Kind, a: Activation) -> Interval | None:
    """From the first part's start to the last one's end; None unless all parts move, as the model knows whole
    activations only."""
    parts = [Op(kind, *a, part) for part in range(model.problem.stages[a[0]].offload_parts)]
    if not all(part in at for part in parts):
        return None
    starts, ends = zip(*(at[part] for part in parts), strict=True)
    return min(starts), max(ends)


def _compute_times(model: Model, at: dict[Op, Interval]) -> dict[Op, Interval]:
    """Start and end of every F, B and W. A BW is a B followed by its W; Ws are numbered as their Bs, with a fixed order
    everything is. In a frame all keep their numbers, for what surrounds the window has them, too."""
    ms, times = model.problem.costs.ms, {}
    for op in compute_ops(model.problem):
        fused = at.get(Op(Kind.BW, op.stage, op.microbatch))
        if fused is None or op.kind == Kind.F:
            times[op] = at[op]
        else:
            middle = fused[0] + float(ms[Kind.B, op.stage])
            times[op] = (fused[0], middle) if op.kind == Kind.B else (middle, fused[1])
    for route, batches in passing(model.problem).items() if model.frame is None else ():
        for s in route:
            F, B, W = ([Op(kind, s, j) for j in batches] for kind in (Kind.F, Kind.B, Kind.W))
            if model.order != "stages":
                W = [w for _, w in sorted(zip((times[b] for b in B), W, strict=True))]
            for own in (F, B, W) if model.order == "stages" else (W,):
                times |= dict(zip(own, sorted(times[op] for op in own), strict=True))
    return times
