"""Taking turns on a host link that several ranks share: a half-duplex link is one lane, a full-duplex one a lane a
direction.

The schedule gives the order of all transfers on a lane. A transfer that follows another rank's there first receives
that rank's token; one that another rank's follows ends by sending a token on. Both stand on the lane itself (on CPU its
thread, on CUDA its copy stream), so no host waits for its turn. Tokens from one rank to another all have the lane's
order, on either side, so they need no tags. Between two steps the token stays where the last transfer was, and the next
step fetches it from there.

Nothing can deadlock that `simulate` accepts. A lane waits for the transfer before in the lane's order, which is an edge
of `optpipe.evaluate.graph`; and a token that is not fetched yet holds up only what comes after the transfer that will
fetch it.

Not measured on CUDA. There a token is a byte over NCCL, whose receiving kernel occupies a multiprocessor while it
waits. Streams go through a few hardware queues, first in, first out: where a copy that waits for its turn shares one
with what it waits for, neither goes on. So CUDA must be given queues enough (`require_queues`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from optpipe.errors import InputError
from optpipe.model.ops import INWARD, Op
from optpipe.schedule import Schedule
from optpipe_runtime.ranks.layout import Layout

if TYPE_CHECKING:
    from optpipe_runtime.memory.pool import Engine
    from optpipe_runtime.ranks.team import Team, Transfer


QUEUES = 32  # the most that CUDA gives; a rank with two neighbours and a peer has about 15 streams


class Turns(NamedTuple):
    """A lane in one step, as one of its ranks sees it."""

    first: int  # the ranks of the first and the last transfer on the lane
    last: int
    after: dict[Op, int]  # this rank's transfers that follow another rank's, and whose
    before: dict[Op, int]  # this rank's transfers that another rank's follows, and whose


def turns(schedule: Schedule, rank: int, layout: Layout) -> tuple[Turns | None, ...]:
    """This rank's turns on each lane of its link; None for a lane without transfers, nothing at all where it shares no
    link."""
    if (link := layout.link(rank)) is None:
        return ()
    order = schedule.links[link].ops() if link in schedule.links else []
    if not layout.full_duplex:
        return (_turns(order, rank, layout),)
    return tuple(
        _turns([op for op in order if (op.kind in INWARD) == inward], rank, layout) for inward in (False, True)
    )


def _turns(order: Sequence[Op], rank: int, layout: Layout) -> Turns | None:
    if not order:
        return None
    owners = [layout.placement[op.stage] for op in order]
    found = Turns(owners[0], owners[-1], {}, {})
    for (a, left), (b, right) in pairwise(zip(order, owners, strict=True)):
        if left != right and right == rank:
            found.after[b] = left
        if left != right and left == rank:
            found.before[a] = right
    return found


class Token:
    """The right to use one lane of a shared link, passed between its ranks; it begins with the lowest of them. Making
    one is collective over the team."""

    def __init__(self, team: Team, sharers: Sequence[int], device: torch.device) -> None:
        self._team, self._group = team, team.subgroup(sharers, device)
        self._holder, self._turns = min(sharers), Turns(min(sharers), min(sharers), {}, {})
        self._coin = torch.zeros(1, dtype=torch.uint8, device=device)

    def start_step(self, turns: Turns, lane: Engine) -> None:
        """On every rank of the link, with the same plan."""
        if self._holder != turns.first:
            if self._team.number == self._holder:
                lane.run(partial(self._move, self._group.send, turns.first))
            elif self._team.number == turns.first:
                lane.run(partial(self._move, self._group.receive, self._holder))
        self._turns, self._holder = turns, turns.last

    @contextmanager
    def turn(self, op: Op, lane: Engine) -> Iterator[None]:
        """What is put on the lane in here has the link to itself, where `op` is a transfer on this lane."""
        if op in self._turns.after:
            lane.run(partial(self._move, self._group.receive, self._turns.after[op]))
        try:
            yield
        finally:  # where the transfer fails for want of memory, the others still get their turns
            if op in self._turns.before:
                lane.run(partial(self._move, self._group.send, self._turns.before[op]))

    def _move(self, move: Callable[[torch.Tensor, int], Transfer], other: int) -> None:
        move(self._coin, other).wait()


def require_queues(layout: Layout, device: torch.device) -> None:
    """`InputError` where links are shared on CUDA and its streams may share hardware queues."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if device.type == "cuda" and layout.shared_links and not (given.isdecimal() and int(given) >= QUEUES):
        raise InputError(
            f"links: CUDA_DEVICE_MAX_CONNECTIONS is {given}; set it to {QUEUES} before the script starts, else a "
            "copy that waits for "
            "its turn may hold up what it waits for"
        )


def tokens(team: Team, layout: Layout, device: torch.device) -> tuple[Token, ...]:
    """One for each lane of this rank's link, none where it shares none. Collective: every rank makes the groups of all
    links."""
    made = [
        (sharers, Token(team, sharers, device))
        for sharers in layout.shared_links.values()
        for _ in range(1 + layout.full_duplex)
    ]
    return tuple(token for sharers, token in made if team.number in sharers)
