"""The objective span (OptPipe Eq. 3): the longest time from a device's first start to its last end.

A simulated schedule starts everything as soon as it can, so the model must not gain by starting a device late: what a
device computes first, a forward, starts at once.
"""

from __future__ import annotations

from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe_solver.cpsat.variables import Choice, Moment, Variables

F, W, D = Kind.F, Kind.W, Kind.D


def limit_spans(v: Variables) -> None:
    """`v.span` is no shorter than the time from each device's first forward to its last weight gradient."""
    starts = _StartsAtOnce(v)
    for d in range(len(v.problem.devices)):
        forwards = [Op(F, s, j) for s, j in v.passes if v.problem.stages[s].device == d]
        if not forwards:
            continue
        begin = v.new_int(0, v.latest, min(v.incumbent.start[x] for x in forwards), f"begin{d}")
        first = [v.model.new_bool_var(f"{x}first") for x in forwards]
        v.model.add_exactly_one(first)
        for x, leads in zip(forwards, first, strict=True):
            v.model.add(begin <= v.start[x])
            v.model.add(begin == v.start[x]).only_enforce_if(leads)
            v.model.add_implication(leads, starts.new_literal(x))
            v.model.add(v.span >= v.compute_end[x._replace(kind=W)] - begin)


class _StartsAtOnce:
    """Literals for whether a forward starts as soon as its message has come or the op before it has ended.

    Forwards that hold each other up are followed to the first one. Of other ops it is not asked whether they could have
    ended sooner. So the model's span is a lower bound of the simulated one, and nearly always equal to it.
    """

    def __init__(self, v: Variables) -> None:
        self.v = v
        self._literals: dict[Op, Choice] = {}

    def new_literal(self, x: Op) -> Choice:
        """Whether a forward starts at once; the same literal for the same op."""
        if x in self._literals:
            return self._literals[x]
        v, s, j = self.v, x.stage, x.microbatch
        at_once = self._literals[x] = v.model.new_bool_var(f"{x}atonce")
        reasons = []
        route = v.problem.route(j)
        if s == route[0]:
            reasons.append(self._new_reason(v.start[x], 0))
        else:
            before = Op(F, route[route.index(s) - 1], j)
            arrival = v.compute_end[before] + v.grid.forward_delay(s, j)
            reasons.append(self._new_reason(v.start[x], arrival, self.new_literal(before)))
        for y in v.free:
            if y != x and v.device(y) == v.device(x) and y.kind in (*COMPUTE, D):
                also = self.new_literal(y) if y.kind == F else v.presence(y)
                reasons.append(self._new_reason(v.start[x], v.start[y] if y.kind == D else v.compute_end[y], also))
        v.model.add_bool_or(reasons).only_enforce_if(at_once)
        return at_once

    def _new_reason(self, start: Moment, end: Moment, also: Choice = True) -> Choice:
        """A new literal that holds only where one op starts as another ends, and something else holds."""
        literal = self.v.model.new_bool_var("reason")
        self.v.model.add(start == end).only_enforce_if(literal)
        if also is not True:
            self.v.model.add_implication(literal, also)
        return literal
