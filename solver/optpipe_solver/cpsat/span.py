"""The objective span (OptPipe Eq. 3): the longest time from a device's first start to its last end.

A simulated schedule starts everything as soon as it can, so the model must not gain by starting a device late: what a
device computes first, a forward, starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe.model.ops import COMPUTE, Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

F, W, D = Kind.F, Kind.W, Kind.D


def longest(w: WindowModel) -> Any:
    """The span. Transfers lie between a device's first forward and its last weight gradient."""
    at_once = _AtOnce(w)
    value = w.variable(0, w.latest, _known(w), "span")
    for d in range(len(w.problem.devices)):
        forwards = [Op(F, s, j) for s, j in w.passes if w.problem.stages[s].device == d]
        if not forwards:
            continue
        begin = w.variable(0, w.latest, min(w.incumbent.start[x] for x in forwards), f"begin{d}")
        first = [w.model.new_bool_var(f"{x}first") for x in forwards]
        w.model.add_exactly_one(first)
        for x, leads in zip(forwards, first, strict=True):
            w.model.add(begin <= w.at[x])
            w.model.add(begin == w.at[x]).only_enforce_if(leads)
            w.model.add_implication(leads, at_once.literal(x))
            w.model.add(value >= w.ended[x._replace(kind=W)] - begin)
    return value


def _known(w: WindowModel) -> int:
    """The incumbent's."""
    spans = []
    for d in range(len(w.problem.devices)):
        own = [(at, x) for x, at in w.incumbent.start.items() if w.problem.stages[x.stage].device == d]
        spans.append(max((at + w.length(x) for at, x in own), default=0) - min((at for at, _ in own), default=0))
    return max(spans)


class _AtOnce:
    """Literals that say of a forward that it waits for nothing but what holds it: its message, or the op before it on
    its device.

    Forwards that hold each other up are followed to the first one; of other ops it is not asked whether they could have
    ended sooner, so the span is a lower bound of the simulated one, and nearly always that.
    """

    def __init__(self, w: WindowModel) -> None:
        self.w = w
        self._literals: dict[Op, Any] = {}

    def literal(self, x: Op) -> Any:
        if x in self._literals:
            return self._literals[x]
        w, s, j = self.w, x.stage, x.microbatch
        held = self._literals[x] = w.model.new_bool_var(f"{x}atonce")
        reasons = []
        route = w.problem.route(j)
        if s == route[0]:
            reasons.append(self._when(w.at[x], 0))
        else:
            before = route[route.index(s) - 1]
            reasons.append(
                self._when(
                    w.at[x], w.ended[Op(F, before, j)] + w.ticks.delay(before, s), self.literal(Op(F, before, j))
                )
            )
        device = w.problem.stages[s].device
        for y in w.inside:
            if y != x and w.problem.stages[y.stage].device == device and y.kind in (*COMPUTE, D):
                also = [self.literal(y)] if y.kind == F else [w.there(y)]
                reasons.append(self._when(w.at[x], w.at[y] if y.kind == D else w.ended[y], *also))
        w.model.add_bool_or(reasons).only_enforce_if(held)
        return held

    def _when(self, at: Any, ended: Any, *also: Any) -> Any:
        literal = self.w.model.new_bool_var("because")
        self.w.model.add(at == ended).only_enforce_if(literal)
        for other in also:
            self.w.model.add_implication(literal, other)
        return literal
