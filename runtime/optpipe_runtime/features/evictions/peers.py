"""`Peers`: activations on their way between a rank and its peer.

The evicting rank sends at E and receives at L. Its peer makes room at A; from then on the bytes can come. The peer
sends them back as soon as they are there, so no op of its own program has to stand between. At V it waits until they
have left, and frees the room.

Each direction of each pair of ranks has a process group of its own. Messages have no tags. So the peer receives in the
order in which the other's program evicts, and sends in the order in which it loads, whatever the order of its own A and
V: each transfer starts when there is room for it and for all before it. Evictions and loads are one stream to
`simulate`, in order, so no rank waits here that would not wait there.

The peer is ready from A on, long before E or L. Over NCCL a kernel as wide as the link would be waiting, on
multiprocessors that compute needs. So the evicting rank announces each transfer by one byte, and only the kernel for
that byte waits. Not measured on CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optpipe_runtime.lowering.plan import StageMicrobatch
from optpipe_runtime.memory.engines import CopyEngine, Handle, copy_engine
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.subgroup import Subgroup, Transfer
from optpipe_runtime.ranks.team import Team


class EvictionOrder(NamedTuple):
    """The activations that one rank evicts to its peer, and those that it loads back, each in program order."""

    evicted: tuple[StageMicrobatch, ...]
    loaded: tuple[StageMicrobatch, ...]


class _Direction(NamedTuple):
    """One direction between a rank and its peer."""

    group: Subgroup
    engine: CopyEngine
    evicting: bool  # whether this rank is the one that evicts
    byte: Tensor

    def send(self, pieces: Sequence[Tensor], to: int, after: Handle | None = None) -> Handle:
        return self._start(self.group.send, pieces, to, after)

    def receive(self, pieces: Sequence[Tensor], source: int) -> Handle:
        return self._start(self.group.receive, pieces, source)

    def _start(
        self, move: Callable[[Tensor, int], Transfer], pieces: Sequence[Tensor], other: int, after: Handle | None = None
    ) -> Handle:
        def work() -> None:
            if after is not None:
                after.wait()
            (self.group.send if self.evicting else self.group.receive)(self.byte, other).wait()
            for transfer in [move(piece, other) for piece in pieces]:
                transfer.wait()

        return self.engine.run(work)


@dataclass
class _Hosted:
    """What this rank keeps for another."""

    pieces: list[Tensor]
    received: Handle | None = None
    returned: Handle | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Peers:
    """One rank's evictions to its peer, as a `Destination`, and what it keeps for others. Making one is collective:
    every rank calls it with the same layout."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        rank = team.number
        self._rank, self._peer, self._device = rank, layout.peer(rank), device
        self._out: dict[int, _Direction] = {}  # by the evicting rank
        self._back: dict[int, _Direction] = {}
        for evictor, acceptor in ((a, b) for a, b in enumerate(layout.peers) if b is not None):
            for directions in (self._out, self._back):
                group = team.subgroup((evictor, acceptor), device)
                if rank in (evictor, acceptor):
                    byte = torch.zeros(1, dtype=torch.uint8, device=device)
                    directions[evictor] = _Direction(group, copy_engine(device), rank == evictor, byte)
        self._hosted: dict[StageMicrobatch, _Hosted] = {}
        self._coming: dict[int, tuple[deque[StageMicrobatch], deque[StageMicrobatch]]] = {}

    def start_step(self, evictions: Mapping[int, EvictionOrder]) -> None:
        """`evictions` is the order of each rank that evicts to this one."""
        self._coming = {evictor: (deque(order.evicted), deque(order.loaded)) for evictor, order in evictions.items()}

    @property
    def idle(self) -> bool:
        return not self._hosted

    # On the rank that evicts

    def take_out(self, pieces: Sequence[Tensor]) -> Sequence[Handle]:
        """E"""
        assert self._peer is not None
        return [self._out[self._rank].send(pieces, self._peer)]

    def bring_back(self, targets: Sequence[Tensor]) -> Sequence[Handle]:
        """L"""
        assert self._peer is not None
        return [self._back[self._rank].receive(targets, self._peer)]

    def release(self) -> None:
        """The peer frees the room, at V."""

    # On its peer

    def accept(self, evictor: int, activation: StageMicrobatch, sizes: Sequence[int]) -> None:
        """A: makes room for blocks of these bytes."""
        blocks = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self._hosted[activation] = _Hosted(blocks)
        evicted, loaded = self._coming[evictor]
        while evicted and (hosted := self._hosted.get(evicted[0])):
            hosted.received = self._out[evictor].receive(hosted.pieces, evictor)
            evicted.popleft()
        while loaded and (hosted := self._hosted.get(loaded[0])) and hosted.received:
            hosted.returned = self._back[evictor].send(hosted.pieces, evictor, hosted.received)
            loaded.popleft()

    def vacate(self, activation: StageMicrobatch) -> None:
        """V: waits until the bytes have left, and frees the room."""
        hosted = self._hosted.pop(activation)
        assert hosted.returned is not None, "what is loaded earlier was also accepted earlier"
        hosted.returned.wait()

    def held_bytes(self, activation: StageMicrobatch) -> int:
        """Device bytes that this rank holds for another rank's activation."""
        return self._hosted[activation].nbytes if activation in self._hosted else 0

    def close(self) -> None:
        for direction in (*self._out.values(), *self._back.values()):
            direction.engine.close()
