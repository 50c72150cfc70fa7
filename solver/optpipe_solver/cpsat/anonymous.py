"""A relaxation for lower bounds in which equal micro-batches are anonymous.

At each stage a route's forwards are numbered as they run, and so are the backwards. Between stages only ranks count:
the k-th forward waits for the k-th of the stage before, the k-th input gradient for the k-th of the stage after. That
holds in every schedule. What is lost is which micro-batch is which, but for the least time that its way there and back
takes. What is won is that little remains to be decided:

Let visit i come before visit j at a stage, and B_j before B_i. Give i the backward of j and j that of i: nobody waits
longer, and memory and link can stay as they are, part by part, but where i was away all the time between F_j and B_j,
by offload or recompute, and j was not. (Both away: the first to leave and the first to return make one visit. Only j:
it is between F and B of both. Only i, but it left after F_j or was back before B_j: between F and B of one of them.) So
only then does j overtake i; all else is first in, first out.

There is one level of recomputation at most: of several one is made that is as good as each (`one_level`).

The variables: F j is the j-th forward of a stage, B j and W j are its j-th backward. BW j stands for the backward of
the j-th forward's activation: one of the Bs, and B j itself where no visit can overtake another.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from optpipe.model.ops import Kind, Op
from optpipe_solver.cpsat.grid import Grid, GridSchedule
from optpipe_solver.cpsat.model import BusyTime, WindowModel
from optpipe_solver.cpsat.variables import Choice, Window, WindowVariables

F, B, W, BW, C, O, R = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.R


class AnonymousVariables(WindowVariables):
    """With the start and end of each BW, the backward of a stage's forward."""

    def backward(self, s: int, j: int) -> Op:
        return Op(BW, s, j)

    def may_be_away(self, s: int) -> bool:
        """Whether activations of a stage can leave its device, or be recomputed."""
        return self.problem.stages[s].can_offload or self.problem.stages[s].can_recompute

    def _create_backward(self, s: int, j: int) -> None:
        x, b = Op(BW, s, j), Op(B, s, j)
        self.start[x] = self.new_int(0, self.latest, 0, f"{x}") if self.may_be_away(s) else self.start[b]
        self.compute_end[x] = self.start[x] + self.duration(b)
        self.free.add(x)


class AnonymousModel(WindowModel):
    """The model of the whole problem with anonymous micro-batches: its solutions are no schedules."""

    variables: AnonymousVariables
    _variables = AnonymousVariables
    _has_points = False

    def __init__(self, grid: Grid, incumbent: GridSchedule) -> None:
        super().__init__(grid, incumbent, Window.of_all(incumbent), in_order=False)

    def _wait_for_messages(self) -> None:
        """Of forwards; `_relate_visits` has those of input gradients."""
        v = self.variables
        for j in range(v.problem.microbatches):
            for s, t in pairwise(v.problem.route(j)):
                self._start_after(Op(F, s, j), Op(F, t, j), v.grid.forward_delay(t, j))

    def _add_no_overlap(self, busy: list[BusyTime]) -> None:
        """Without points, so that strong propagation refutes no solution."""
        super()._add_no_overlap([each for each in busy if each.length > 0])

    def _relate_visits(self) -> None:
        """The k-th op of a stage waits for the k-th of its neighbour; its visits overtake only for a reason."""
        v = self.variables
        for visits in v.problem.costs.classes:
            route, first = v.problem.route(visits[0]), visits[0]
            way = 0  # from the end of a stage's forward to the start of its input gradient, at least
            for s, t in reversed([*pairwise(route), (route[-1], route[-1])]):
                if s != t:
                    delay = v.grid.gradient_delay(s, first)
                    way += v.duration(Op(F, t, first)) + v.duration(Op(B, t, first))
                    way += v.grid.forward_delay(t, first) + delay
                    for k in visits:
                        v.model.add(v.start[Op(B, s, k)] >= v.start[Op(B, t, k)] + v.duration(Op(B, t, k)) + delay)
                for j in visits:
                    v.model.add(v.start[Op(BW, s, j)] >= v.compute_end[Op(F, s, j)] + way)
                # The W of a BW need not wait for that of a B before it.
                for kind in (F, B) if v.grid.needs_fused[s] else (F, B, W):
                    for i, j in pairwise(visits):
                        v.model.add(v.start[Op(kind, s, j)] >= v.start[Op(kind, s, i)] + v.duration(Op(kind, s, i)))
                if v.may_be_away(s):
                    self._overtake_only_for_a_reason(s, visits)

    def _overtake_only_for_a_reason(self, s: int, visits: list[int]) -> None:
        """Each visit has a backward of its own; not that of its own rank only where that may be worth something."""
        v = self.variables
        ranked = [v.start[Op(B, s, k)] for k in visits]
        rank = [v.new_int(0, len(visits) - 1, k, f"{s}rank{k}") for k in range(len(visits))]
        v.model.add_all_different(rank)
        for j, k in zip(visits, rank, strict=True):
            v.model.add_element(k, ranked, v.start[Op(BW, s, j)])
        for (p, i), (q, j) in combinations(enumerate(visits), 2):
            overtakes = v.model.new_bool_var(f"{s}:{j}overtakes{i}")
            first, second = Op(BW, s, i), Op(BW, s, j)
            v.model.add(rank[q] < rank[p]).only_enforce_if(overtakes)
            v.model.add(rank[p] < rank[q]).only_enforce_if(~overtakes)
            v.model.add(v.start[first] >= v.compute_end[second]).only_enforce_if(overtakes)
            v.model.add(v.start[second] >= v.compute_end[first]).only_enforce_if(~overtakes)
            v.model.add_bool_or(~overtakes, *self._new_overtaking_reasons(s, i, j))

    def _new_overtaking_reasons(self, s: int, i: int, j: int) -> list[Choice]:
        """New literals, one of which holds where it may be worth something that j overtakes i."""
        v = self.variables
        forward, backward = v.compute_end[Op(F, s, j)], v.start[Op(BW, s, j)]
        i_recomputed, j_recomputed = v.level[s, i].get(0), v.level[s, j].get(0)
        reasons: list[Choice] = []
        for p in v.grid.parts(s, i):
            o, r = Op(O, s, i, p), Op(R, s, i, p)
            reason = v.model.new_bool_var("away")
            v.model.add_bool_and(v.offloaded[s, i, p], ~v.offloaded[s, j, p]).only_enforce_if(reason)
            # An activation that is recomputed is away in another way.
            when = [reason] if j_recomputed is None else [reason, ~j_recomputed]
            v.model.add(v.start[o] < forward).only_enforce_if(*when)
            v.model.add(v.start[r] + v.duration(r) > backward).only_enforce_if(*when)
            reasons.append(reason)
            # The copies of j would stay on the host until B_i, and i cannot take them over.
            if i_recomputed is not None and v.host_capacity(s) is not None:
                reason = v.model.new_bool_var("copied")
                v.model.add_bool_and(i_recomputed, v.offloaded[s, j, p]).only_enforce_if(reason)
                reasons.append(reason)
        if i_recomputed is not None and j_recomputed is not None:
            reason = v.model.new_bool_var("recomputed")
            v.model.add_bool_and(i_recomputed, ~j_recomputed).only_enforce_if(reason)
            v.model.add(v.compute_end[Op(C, s, i)] > backward).only_enforce_if(reason)
            reasons.append(reason)
        return reasons
