"""A device's link to the host, and the schedule's order of transfers where several ranks share a link.

The schedule gives the order of all transfers on each channel of the link. A transfer that follows another rank's first
receives that rank's token; a transfer that another rank's follows sends a token at its end. Both run on the channel
itself (on CPU its thread, on CUDA its copy stream), so no host waits. Tokens from one rank to another have the
channel's order on both sides, so they need no tags. After the last transfer of a step the token goes back to the rank
of the first one, which can begin the next step before the other has ended this one. If that step is by another
schedule, the token is passed on when it begins.

Nothing can deadlock that `simulate` accepts. A channel waits for the previous transfer in the channel's order, which
is an edge of the graph that `simulate` follows; and a token that is not fetched yet holds up only what comes after the
transfer that will fetch it.

Not measured on CUDA. There a token is a byte over NCCL, whose receiving kernel occupies a multiprocessor while it
waits. Streams share a few hardware queues, first in, first out: if a copy that waits for its token shares a queue with
what it waits for, neither goes on. So CUDA must be given enough queues (`require_queues`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from optpipe.errors import InputError
from optpipe.model.ops import Op
from optpipe_runtime.lowering.plan import LinkOrder
from optpipe_runtime.memory.engines import CopyEngine, copy_engine
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team, Transfer

QUEUES = 32  # the most that CUDA gives
DEFAULT_QUEUES = 8


class Link:
    """A device's link to the host: one channel if it is half duplex, one for each direction if it is full duplex. If
    ranks share the link, `tokens` has one token for each channel."""

    def __init__(self, device: torch.device, full_duplex: bool, tokens: Sequence[ChannelToken] = ()) -> None:
        self.out = copy_engine(device)
        self.back = copy_engine(device) if full_duplex else self.out
        self._shared = tuple(zip(tokens, self._channels, strict=True)) if tokens else ()

    @property
    def _channels(self) -> tuple[CopyEngine, ...]:
        return (self.out,) if self.back is self.out else (self.out, self.back)

    def start_step(self, orders: Sequence[LinkOrder | None]) -> None:
        """`orders` are the transfers of this step, channel by channel."""
        for (token, channel), order in zip(self._shared, orders, strict=True):
            if order is not None:
                token.start_step(order, channel)

    @contextmanager
    def in_order(self, op: Op) -> Iterator[None]:
        """What `op` transfers in this context crosses a shared link in the schedule's order."""
        with ExitStack() as stack:
            for token, channel in self._shared:
                stack.enter_context(token.in_order(op, channel))
            yield

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class ChannelToken:
    """The right to use one channel of a shared link, passed between its ranks. The lowest rank has it first. Making one
    is collective over the team."""

    def __init__(self, team: Team, sharers: Sequence[int], device: torch.device) -> None:
        self._team, self._group = team, team.subgroup(sharers, device)
        self._holder, self._order = min(sharers), LinkOrder(min(sharers), min(sharers), {}, {}, None)
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)

    def start_step(self, order: LinkOrder, channel: CopyEngine) -> None:
        """Call it on every rank of the link, with the orders of the same schedule."""
        if self._holder != order.first:
            if self._team.number == self._holder:
                channel.run(partial(self._pass, self._group.send, order.first))
            elif self._team.number == order.first:
                channel.run(partial(self._pass, self._group.receive, self._holder))
        self._order, self._holder = order, order.first

    @contextmanager
    def in_order(self, op: Op, channel: CopyEngine) -> Iterator[None]:
        """What the channel is given in this context has the link to itself, if `op` is a transfer on this channel."""
        if op in self._order.after:
            channel.run(partial(self._pass, self._group.receive, self._order.after[op]))
        try:
            yield
        finally:  # even if the transfer fails for lack of memory, the other ranks get the token
            if op in self._order.before:
                channel.run(partial(self._pass, self._group.send, self._order.before[op]))
            if op == self._order.final:
                last = self._team.number == self._order.last
                move, other = (self._group.send, self._order.first) if last else (self._group.receive, self._order.last)
                channel.run(partial(self._pass, move, other))

    def _pass(self, move: Callable[[torch.Tensor, int], Transfer], other: int) -> None:
        move(self._byte, other).wait()


def streams_used(layout: Layout, rank: int) -> int:
    """How many CUDA streams of a rank may have work at once: compute, copies, one for each process group, and one for
    each direction of each eviction. 1 for a rank that sends and receives nothing."""
    ranks = [(layout.placement[a], layout.placement[b]) for _, a, b in layout.neighbours()]
    neighbours = {other for a, b in ranks if rank in (a, b) for other in (a, b)} - {rank}
    evictions = sum(rank in pair for pair in enumerate(layout.peers) if pair[1] is not None)
    tokens = 0 if layout.link(rank) is None else 1 + layout.full_duplex
    if not (neighbours or evictions or tokens):
        return 1
    return 1 + (1 + layout.full_duplex) + 2 * len(neighbours) + 4 * evictions + tokens


def require_queues(layout: Layout, rank: int, device: torch.device) -> None:
    """Raises `InputError` if streams of this rank on CUDA may share hardware queues."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", str(DEFAULT_QUEUES))
    used = streams_used(layout, rank)
    needed = QUEUES if layout.shared_links else min(used, QUEUES)
    if device.type == "cuda" and used > 1 and not (queues.isdecimal() and int(queues) >= needed):
        why = (
            "links are shared, and a copy that waits for its turn may hold up what it waits for"
            if layout.shared_links
            else f"rank {rank} uses {used} streams, and what waits for a message holds up all in the same queue"
        )
        raise InputError(f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}: set it to {needed} before the script starts; {why}")


def channel_tokens(team: Team, layout: Layout, device: torch.device) -> tuple[ChannelToken, ...]:
    """Collective, as ranks make the groups of all links: a token for each channel of a shared link of this rank."""
    tokens = [
        (sharers, ChannelToken(team, sharers, device))
        for sharers in layout.shared_links.values()
        for _ in range(1 + layout.full_duplex)
    ]
    return tuple(token for sharers, token in tokens if team.number in sharers)
