"""Messages between ranks: non-blocking sends, receives posted ahead, first in, first out per ordered pair of ranks.

Each ordered pair has a process group of its own, so that the two directions never wait for each other (one NCCL
communicator has one stream for both). At most `UNDER_WAY` messages to one rank are under way: before another is sent,
the host waits for the end of an earlier one, on CUDA the compute stream, and its tensors are let go. That waits for no
op that comes later (`lowering.prepare`). So what messages hold is computed before the step (`Plan.message_peak`).
The default budget of activations leaves room for some of them (`messages_reserve`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime.lowering.plan import UNDER_WAY, Message
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team, Transfer
from optpipe_runtime.stage.io import Spec, StageIO, Tensors


class Messages:
    """One rank's messages. Making one is collective: every rank of the team calls it with the same layout."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        self._rank, self._device = team.number, device
        pairs = {(layout.placement[a], layout.placement[b]) for _, a, b in layout.neighbours()}
        neighbours = {(a, b) for a, b in pairs if a != b}
        self._groups = {
            pair: team.subgroup(pair, device) for pair in sorted(neighbours | {(b, a) for a, b in neighbours})
        }
        self._sending: dict[int, deque[_Transfers]] = {
            to: deque() for source, to in self._groups if source == self._rank
        }
        self._here: dict[Message, Tensors] = {}
        self._posted: dict[Message, _Transfers] = {}
        self._begun: set[Message] = set()  # posted in this step
        self.peak_bytes = 0  # receive buffers and sends under way, since `start_step`

    def start_step(self) -> None:
        """Waits until the sends of the step before have ended: their receivers have asked for them in that step."""
        self.flush()
        self.peak_bytes = 0
        self._begun.clear()

    def post(self, message: Message, source: int, specs: Sequence[Spec]) -> None:
        """Allocates the buffers of a message and starts to receive it, once a step."""
        if message in self._begun:
            return
        buffers, group = tuple(spec.empty(self._device) for spec in specs), self._groups[source, self._rank]
        self._posted[message] = _Transfers([group.receive(buffer, source) for buffer in buffers], buffers)
        self._begun.add(message)
        self._count()

    def take(self, message: Message) -> Tensors:
        """Waits for a message. The caller owns its tensors."""
        if message in self._here:
            return self._here.pop(message)
        return self._posted.pop(message).wait()

    def discard(self, message: Message) -> None:
        """Receives and drops a message, unless it has been taken already."""
        if message in self._posted:
            self.take(message)

    def abandon(self) -> None:
        """Drops what stages on this rank have sent to each other."""
        self._here.clear()

    def send(self, message: Message, tensors: Tensors, to: int, specs: Sequence[Spec]) -> None:
        """Sends a message to another rank, or hands it to another stage on this one."""
        for tensor, spec in zip(tensors, specs, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise InputError(
                    f"{message} has shape {list(tensor.shape)} and type {tensor.dtype}, where {list(spec.shape)} and "
                    f"{spec.dtype} were expected: what a stage returns must follow from the shapes of the micro-batch"
                )
        if to == self._rank:
            self._here[message] = tensors
            return
        self.make_room(to)
        group, sent = self._groups[self._rank, to], tuple(map(_alone, tensors))
        self._sending[to].append(_Transfers([group.send(tensor, to) for tensor in sent], sent))
        self._count()

    def make_room(self, to: int, left: int = UNDER_WAY - 1) -> None:
        """Waits until so many messages to a rank are left under way. Call it before the op that makes another: then the
        op is not blamed for the time, and on CUDA may use the memory."""
        while len(self._sending.get(to, ())) > left:
            self._sending[to].popleft().wait()

    def _count(self) -> None:
        held = [*self._posted.values(), *(sent for sending in self._sending.values() for sent in sending)]
        self.peak_bytes = max(self.peak_bytes, sum(tensor.nbytes for transfers in held for tensor in transfers.tensors))

    @property
    def idle(self) -> bool:
        return not self._here and not self._posted

    def flush(self) -> None:
        """Waits until every send has ended."""
        for to in self._sending:
            self.make_room(to, left=0)


class _Transfers(NamedTuple):
    transfers: list[Transfer]
    tensors: Tensors

    def wait(self) -> Tensors:
        for transfer in self.transfers:
            transfer.wait()
        return self.tensors


def _alone(tensor: Tensor) -> Tensor:
    """The tensor as it can be sent: contiguous, resolved, and alone in its storage, which holds no more bytes."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def messages_reserve(rank: int, layout: Layout, io: Mapping[tuple[int, int], StageIO]) -> int:
    """The bytes that are set aside for messages, whatever the schedule: two to each other rank and two from it, the
    largest ones. `Plan.message_peak` is what a schedule needs."""
    largest: dict[tuple[int, int], int] = defaultdict(int)  # by sender and receiver
    for (stage, form), each in io.items():
        after = layout.neighbour_after(stage, form % len(layout.routes))
        if after is None:
            continue
        sender, receiver = layout.placement[stage], layout.placement[after]
        for pair, specs in (((sender, receiver), each.outputs), ((receiver, sender), each.output_gradients)):
            largest[pair] = max(largest[pair], sum(spec.nbytes for spec in specs))
    return UNDER_WAY * sum(nbytes for pair, nbytes in largest.items() if rank in pair and pair[0] != pair[1])
