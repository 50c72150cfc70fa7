"""Evictions (BPipe): activations that wait for their backward on another rank's device.

The evicting rank sends a parcel at E and receives it back at L. Its peer makes room at A, from where on the bytes can
come; it sends them back as soon as they are there, so that no op of its own program has to stand between; at V it waits
until they have left, and lets the room go. Each direction of each pair of ranks has a process group of its own.
Messages have no tags, so the peer receives in the order in which the other's program evicts and sends in the order in
which it loads, whatever the order of its own A and V: each begins when there is room for it and for all before it.
Evictions and loads are one stream to `simulate`, in order, so nobody waits here who would not wait there.

The peer is ready from A on, long before E or L. Over NCCL it would be a kernel as wide as the link that is ready, on
multiprocessors that compute is to have; so the evicting rank announces each transfer by a byte, and what waits is the
kernel for that. Not measured on CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optpipe_runtime.execute.lowering import Guests, Visit
from optpipe_runtime.memory.pool import Engine, Ticket, engine
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Subgroup, Team, Transfer


class _Way(NamedTuple):
    """One direction between a rank and its peer."""

    group: Subgroup
    engine: Engine
    evicting: bool  # whether this rank is the one that evicts
    byte: Tensor

    def send(self, pieces: Sequence[Tensor], to: int, after: Ticket | None = None) -> Ticket:
        return self._start(self.group.send, pieces, to, after)

    def receive(self, pieces: Sequence[Tensor], source: int) -> Ticket:
        return self._start(self.group.receive, pieces, source)

    def _start(
        self, move: Callable[[Tensor, int], Transfer], pieces: Sequence[Tensor], other: int, after: Ticket | None = None
    ) -> Ticket:
        def work() -> None:
            if after is not None:
                after.wait()
            (self.group.send if self.evicting else self.group.receive)(self.byte, other).wait()
            for transfer in [move(piece, other) for piece in pieces]:
                transfer.wait()

        return self.engine.run(work)


@dataclass
class _Room:
    """What this rank keeps for another."""

    pieces: list[Tensor]
    received: Ticket | None = None
    returned: Ticket | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Peers:
    """One rank's evictions to its peer, as a `Carrier`, and the rooms it has for others. Making one is collective:
    every rank calls it with the same layout."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        rank = team.number
        self._rank, self._peer, self._device = rank, layout.peer(rank), device
        self._out: dict[int, _Way] = {}  # by the evicting rank
        self._back: dict[int, _Way] = {}
        for evictor, acceptor in ((a, b) for a, b in enumerate(layout.peers) if b is not None):
            for ways in (self._out, self._back):
                group = team.subgroup((evictor, acceptor), device)
                if rank in (evictor, acceptor):
                    ways[evictor] = _Way(
                        group, engine(device), rank == evictor, torch.zeros(1, dtype=torch.uint8, device=device)
                    )
        self._rooms: dict[Visit, _Room] = {}
        self._coming: dict[int, tuple[deque[Visit], deque[Visit]]] = {}

    def start_step(self, guests: Mapping[int, Guests]) -> None:
        """`guests`: of each rank that evicts to this one."""
        self._coming = {evictor: (deque(visits.evicted), deque(visits.loaded)) for evictor, visits in guests.items()}

    @property
    def idle(self) -> bool:
        return not self._rooms

    # On the rank that evicts

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        """E"""
        assert self._peer is not None
        return [self._out[self._rank].send(pieces, self._peer)]

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        """L"""
        assert self._peer is not None
        return [self._back[self._rank].receive(homes, self._peer)]

    def end(self) -> None:
        """The room is the peer's to let go."""

    # On its peer

    def accept(self, evictor: int, visit: Visit, sizes: Sequence[int]) -> None:
        """A: room for blocks of these bytes."""
        self._rooms[visit] = _Room([torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes])
        evicted, loaded = self._coming[evictor]
        while evicted and (room := self._rooms.get(evicted[0])):
            room.received = self._out[evictor].receive(room.pieces, evictor)
            evicted.popleft()
        while loaded and (room := self._rooms.get(loaded[0])) and room.received:
            room.returned = self._back[evictor].send(room.pieces, evictor, room.received)
            loaded.popleft()

    def vacate(self, visit: Visit) -> None:
        """V"""
        room = self._rooms.pop(visit)
        assert room.returned is not None, "what is loaded before it was accepted before, too"
        room.returned.wait()

    def held_bytes(self, visit: Visit) -> int:
        """Device bytes that this rank holds for another's visit."""
        return self._rooms[visit].nbytes if visit in self._rooms else 0

    def close(self) -> None:
        for way in (*self._out.values(), *self._back.values()):
            way.engine.close()
