"""The rows of offloads and reloads, Eq. 10 to 13, 18 and 19: one function for each family.

The paper offloads "the activations of (i, j, c)" for any c; what a problem lets leave is what F produced, so O, R and W
are of (i, j).
"""

from __future__ import annotations

from itertools import product

from optpipe.model.ops import Kind, Op
from optpipe_solver.milp.rows import Literal
from optpipe_solver.milp.variables import Span, Time, Variables


def add_transfer_chains(v: Variables) -> None:
    """F, then O, its drop, R, then B, as section 3.3 tells; the appendix prints no equation for it."""
    for a in v.activations:
        B = Op(Kind.B, *a)
        when = () if v.keeps_place(a) else (v.W[a],)
        v.add_follows(v.O[a], v.end(Op(Kind.F, *a)))
        v.add_follows(v.A[a], v.O[a], span=v.transfer_span(Kind.O, a))
        v.add_follows(v.R[a], v.A[a])
        time = float(v.costs.ms[Kind.B, a[0]] * v.paths.scale)
        v.add_follows(v.end(B), v.R[a], time, v.transfer_span(Kind.R, a), when)


def add_links(v: Variables) -> None:
    """Eq. 10 to 13: transfers on a link run one at a time; and Eq. 18 and 19 for those of two devices.

    As printed Eq. 18 and 19 lack their big-M (L alone, at most 1, would relax them by one unit of time), have L where K
    is meant, relate a micro-batch to itself only, and leave out O of one device against R of the other. Any two
    transfers on a link exclude each other, so the rows are those of Eq. 10 to 13.
    """
    for one_device in (True, False):
        for a, b in v.K:
            if (v.costs.device[a[0]] == v.costs.device[b[0]]) == one_device:
                offload, reload = v.transfer_span(Kind.O, a), v.transfer_span(Kind.R, a)
                # Eq. 10 and 11. A transfer that is not made has no length: only the length is multiplied by W, and the
                # order needs no (1 - W).
                _add_sequence(v, v.O[a], offload, v.O[b], v.K[a, b])
                _add_sequence(v, v.R[a], reload, v.R[b], v.L[a, b])
                if H := v.H.get((a, b)):  # Eq. 12 and 13, where the link is half duplex
                    _add_sequence(v, v.O[a], offload, v.R[b], H)
                    _add_sequence(v, v.R[b], v.transfer_span(Kind.R, b), v.O[a], ~H)
                if one_device:  # reloads allocate in the order that they have on the link
                    v.add_follows(v.A[b], v.A[a], when=(v.L[a, b], v.W[a], v.W[b]))


def _add_sequence(v: Variables, earlier: Time, span: Span, later: Time, when: Literal) -> None:
    """One transfer behind another. Where one is outside the window, `add_surroundings` sees to it."""
    if not {earlier[0], later[0]} & {v.zero, v.C}:
        v.add_follows(later, earlier, span=span, when=(when,))


def add_surroundings(v: Variables) -> None:
    """Transfers in the window follow those before it on their link and precede those after it; so does an offload its
    later drop. A reload that allocates in the window does so after the ops before it."""
    if not v.around:
        return
    for a, (kind, times) in product(v.activations, ((Kind.O, v.O), (Kind.R, v.R))):
        if v.around.transfers[a].times[kind == Kind.R] is None:
            free, tail = v.around.link(v.costs.device[a[0]], kind)
            v.add_follows(times[a], v.time(free), when=(v.W[a],))
            v.add_follows(v.time(tail), times[a], span=v.transfer_span(kind, a), when=(v.W[a],))
    for a in v.activations:
        if v.around.transfers[a].A is None:
            v.add_follows(v.A[a], v.time(v.around.last_end_before(v.costs.device[a[0]])), when=(v.W[a],))
        if drop := v.around.late_drop(a):
            v.add_follows(v.time(drop), v.O[a], span=v.transfer_span(Kind.O, a))
