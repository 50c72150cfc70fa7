"""The rows of offloads and reloads, Eq. 10 to 13, 18 and 19: one function for each family.

The paper offloads "the activations of (i, j, c)" for any c; what a problem lets leave is what F produced, so O, R and W
are of (i, j).
"""

from __future__ import annotations

from optpipe.model.ops import Kind
from optpipe_solver.milp.variables import Variables


def forward_offload_reload_backward(v: Variables) -> None:
    """F, then O, its drop, R, then B, as section 3.3 tells; the appendix prints no equation for it."""
    for a in v.activations:
        F, B = v.number(Kind.F, a), v.number(Kind.B, a)
        when = () if v.keeps_place(a) else (v.W[a],)
        v.add_follows(v.O[a], v.E[F])
        v.add_follows(v.A[a], v.O[a], span=v.transfer_span(Kind.O, a))
        v.add_follows(v.R[a], v.A[a])
        v.add_follows(v.E[B], v.R[a], float(v.paths.time[B]), v.transfer_span(Kind.R, a), when)


def no_overlap_on_link(v: Variables) -> None:
    """Eq. 10 to 13: transfers on a link run one at a time; and Eq. 18 and 19 for those of two devices.

    A transfer that is not made has no length: only the length is multiplied by W, and the order needs no (1 - W). As
    printed Eq. 18 and 19 lack their big-M (L alone, at most 1, would relax them by one unit of time), have L where K is
    meant, relate a micro-batch to itself only, and leave out O of one device against R of the other. Any two transfers
    on a link exclude each other, so the rows are those of Eq. 10 to 13.
    """
    for a, b in v.K:
        offload, reload = v.transfer_span(Kind.O, a), v.transfer_span(Kind.R, a)
        v.add_follows(v.O[b], v.O[a], span=offload, when=(v.K[a, b],))  # Eq. 10
        v.add_follows(v.R[b], v.R[a], span=reload, when=(v.L[a, b],))  # Eq. 11
        if H := v.H.get((a, b)):  # Eq. 12 and 13, where the link is half duplex
            v.add_follows(v.R[b], v.O[a], span=offload, when=(H,))
            v.add_follows(v.O[a], v.R[b], span=v.transfer_span(Kind.R, b), when=(~H,))


def reloads_allocate_in_link_order(v: Variables) -> None:
    """Not of the paper: reloads of a device allocate in the order that they have on the link."""
    for (a, b), L in v.L.items():
        if v.costs.device[a[0]] == v.costs.device[b[0]]:
            v.add_follows(v.A[b], v.A[a], when=(L, v.W[a], v.W[b]))
