"""A relaxation in which micro-batches have no names: the order "ranks", for lower bounds.

At each stage a route's forwards are numbered as they run, and so are the backwards; between stages only ranks count:
the k-th forward waits for the k-th of the stage before, the k-th input gradient for the k-th of the stage after. That
holds in every schedule. What is lost is which micro-batch is which, but for the least time that its way there and back
takes. What is won is that little remains to be decided:

Let visit i come before visit j at a stage, and B_j before B_i. Give i the backward of j and j that of i: nobody waits
longer, and memory and link can stay as they are, part by part, but where i was away all the time between F_j and B_j,
by offload or recompute, and j was not. (Both away: the first to leave and the first to return make one visit. Only j:
it is between F and B of both. Only i, but it left after F_j or was back before B_j: between F and B of one of them.) So
only then does j overtake i; all else is first in, first out.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from optpipe.model.ops import Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

F, B, W, BW, C, O, R = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.R


def place(w: WindowModel, s: int, j: int) -> None:
    """F j is the j-th forward, B j and W j are the j-th backward of a stage; BW j stands for the backward of the j-th
    forward's activation: one of the Bs, the same where none can overtake another."""
    b, mine = Op(B, s, j), Op(BW, s, j)
    w.at[mine] = w.variable(0, w.latest, 0, f"{mine}") if _can_be_away(w, s) else w.at[b]
    w.ended[mine] = w.at[mine] + w.length(b)
    w.inside.add(mine)


def relate(w: WindowModel) -> None:
    """What the stages of a route mean for each other, and what the visits of one stage do."""
    for number, route in enumerate(w.problem.all_routes):
        visits = [j for j in range(w.problem.microbatches) if int(w.problem.costs.route[j]) == number]
        turn = 0  # from the end of a stage's forward to the start of its input gradient, at least
        for s, t in reversed([*pairwise(route), (route[-1], route[-1])]):
            if s != t:
                delay = w.ticks.delay(s, t)
                turn += w.length(Op(F, t, 0)) + w.length(Op(B, t, 0)) + 2 * delay
                for k in visits:
                    w.model.add(w.at[Op(B, s, k)] >= w.at[Op(B, t, k)] + w.length(Op(B, t, k)) + delay)
            for j in visits:
                w.model.add(w.at[Op(BW, s, j)] >= w.ended[Op(F, s, j)] + turn)
            for kind in (
                (F, B) if w.ticks.may_fuse(s) else (F, B, W)
            ):  # the W of a BW need not wait for that of a B before it
                for i, j in pairwise(visits):
                    w.model.add(w.at[Op(kind, s, j)] >= w.at[Op(kind, s, i)] + w.length(Op(kind, s, i)))
            if _can_be_away(w, s):
                _overtaking(w, s, visits)


def _can_be_away(w: WindowModel, s: int) -> bool:
    return w.problem.stages[s].can_offload or w.problem.stages[s].can_recompute


def _overtaking(w: WindowModel, s: int, visits: list[int]) -> None:
    """Each visit has a backward of its own, and only where it may be worth something not that of its own rank."""
    ranked = [w.at[Op(B, s, k)] for k in visits]
    rank = [w.variable(0, len(visits) - 1, k, f"{s}rank{k}") for k in range(len(visits))]
    w.model.add_all_different(rank)
    for j, k in zip(visits, rank, strict=True):
        w.model.add_element(k, ranked, w.at[Op(BW, s, j)])
    for (p, i), (q, j) in combinations(enumerate(visits), 2):
        overtakes = w.model.new_bool_var(f"{s}:{j}overtakes{i}")
        first, second = Op(BW, s, i), Op(BW, s, j)
        w.model.add(rank[q] < rank[p]).only_enforce_if(overtakes)
        w.model.add(rank[p] < rank[q]).only_enforce_if(~overtakes)
        w.model.add(w.at[first] >= w.ended[second]).only_enforce_if(overtakes)
        w.model.add(w.at[second] >= w.ended[first]).only_enforce_if(~overtakes)
        w.model.add_bool_or(~overtakes, *_reasons(w, s, i, j))


def _reasons(w: WindowModel, s: int, i: int, j: int) -> list[Any]:
    """Literals, one of which holds where it may be worth something that j overtakes i."""
    forward, backward = w.ended[Op(F, s, j)], w.at[Op(BW, s, j)]
    recomputed, recomputes = w.again.get((s, i)), w.again.get((s, j))
    reasons = []
    for p in range(len(w.ticks.activations[s].parts)):
        away, stays, o, r = w.leaves[s, i, p], ~w.leaves[s, j, p], Op(O, s, i, p), Op(R, s, i, p)
        reason = w.model.new_bool_var("away")
        w.model.add_bool_and(away, stays).only_enforce_if(reason)
        simple = [reason] if recomputes is None else [reason, ~recomputes]  # what recomputes is away in another way
        w.model.add(w.at[o] < forward).only_enforce_if(*simple)
        w.model.add(w.at[r] + w.length(r) > backward).only_enforce_if(*simple)
        reasons.append(reason)
        if (
            recomputed is not None and w.host_capacity(s) is not None
        ):  # j's copies would stay until B_i, and i cannot take them over
            reason = w.model.new_bool_var("copied")
            w.model.add_bool_and(recomputed, w.leaves[s, j, p]).only_enforce_if(reason)
            reasons.append(reason)
    if recomputed is not None and recomputes is not None:
        reason = w.model.new_bool_var("recomputed")
        w.model.add_bool_and(recomputed, ~recomputes).only_enforce_if(reason)
        w.model.add(w.ended[Op(C, s, i)] > backward).only_enforce_if(reason)
        reasons.append(reason)
    return reasons
