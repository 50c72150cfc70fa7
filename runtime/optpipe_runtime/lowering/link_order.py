"""The order of transfers on a host link that several ranks share, as one of them sees it.

A half-duplex link is one channel; a full-duplex link has one channel out and one in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from optpipe.model.ops import INWARD, Op
from optpipe.schedule import Schedule
from optpipe_runtime.ranks.layout import Layout


class LinkOrder(NamedTuple):
    """One channel of a shared link in one step, as one of its ranks sees it."""

    first: int  # the rank of the first transfer on the channel
    last: int  # and of the last
    after: dict[Op, int]  # this rank's transfers that directly follow another rank's, and that rank
    before: dict[Op, int]  # this rank's transfers that another rank's directly follows, and that rank
    final: Op | None  # this rank's last transfer, if it is on one of `first` and `last` and these are two


def link_orders(schedule: Schedule, rank: int, layout: Layout) -> tuple[LinkOrder | None, ...]:
    """One entry for each channel of the rank's link, None for a channel without transfers. Empty if the rank shares no
    link."""
    if (link := layout.link(rank)) is None:
        return ()
    order = schedule.links[link].ops() if link in schedule.links else []
    if not layout.full_duplex:
        return (_link_order(order, rank, layout),)
    return tuple(
        _link_order([op for op in order if (op.kind in INWARD) == inward], rank, layout) for inward in (False, True)
    )


def _link_order(transfers: Sequence[Op], rank: int, layout: Layout) -> LinkOrder | None:
    if not transfers:
        return None
    owners = [layout.placement[op.stage] for op in transfers]
    first, last = owners[0], owners[-1]
    transfers_here = [op for op, owner in zip(transfers, owners, strict=True) if owner == rank]
    order = LinkOrder(first, last, {}, {}, transfers_here[-1] if first != last and rank in (first, last) else None)
    for (a, left), (b, right) in pairwise(zip(transfers, owners, strict=True)):
        if left != right and right == rank:
            order.after[b] = left
        if left != right and left == rank:
            order.before[a] = right
    return order
