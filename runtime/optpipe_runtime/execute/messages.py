"""Messages between ranks: non-blocking sends, receives posted ahead, first in, first out per ordered pair of ranks.

Each ordered pair has a process group of its own, so that the two directions never wait for each other (one NCCL
communicator has one stream for both). Sends never block the program: gloo completes a send only in `wait`, so one
thread for each receiver waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime.lowering.plan import Message
from optpipe_runtime.memory.storage import StorageRef
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team, Transfer
from optpipe_runtime.stage.io import Spec, Tensors


class Messages:
    """One rank's messages. Making one is collective: every rank of the team calls it with the same layout."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        self._rank, self._device = team.number, device
        pairs = {(layout.placement[a], layout.placement[b]) for _, a, b in layout.neighbours()}
        neighbours = {(a, b) for a, b in pairs if a != b}
        self._groups = {
            pair: team.subgroup(pair, device) for pair in sorted(neighbours | {(b, a) for a, b in neighbours})
        }
        self._senders = {to: _Sender(device) for source, to in self._groups if source == self._rank}
        self._here: dict[Message, Tensors] = {}
        self._posted: dict[Message, tuple[list[Transfer], Tensors]] = {}
        self._known: set[Message] = set()  # posted in this step
        self._sending: deque[StorageRef] = deque()
        self.peak_bytes = 0  # receive buffers and sends under way, since `start_step`

    def start_step(self) -> None:
        self.peak_bytes = 0
        self._known.clear()

    def post(self, message: Message, source: int, specs: Sequence[Spec]) -> None:
        """Allocates the buffers of a message and starts to receive it, once a step."""
        if message in self._known:
            return
        buffers = tuple(spec.empty(self._device) for spec in specs)
        group = self._groups[source, self._rank]
        self._posted[message] = ([group.receive(buffer, source) for buffer in buffers], buffers)
        self._known.add(message)
        self._count()

    def take(self, message: Message) -> Tensors:
        """Waits for a message. The caller owns its tensors."""
        if message in self._here:
            return self._here.pop(message)
        transfers, buffers = self._posted.pop(message)
        for transfer in transfers:
            transfer.wait()
        return buffers

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
                    f"{message} has shape {list(tensor.shape)} and type {tensor.dtype}: it was {list(spec.shape)} and "
                    f"{spec.dtype} at the start, and must have the same shape in every micro-batch"
                )
        if to == self._rank:
            self._here[message] = tensors
            return
        group = self._groups[self._rank, to]
        for whole in [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]:
            self._sending.append(StorageRef(whole.untyped_storage()))
            self._senders[to].put(group.send(whole, to), whole)
        self._count()

    def _count(self) -> None:
        while self._sending and not self._sending[0].alive:
            self._sending.popleft()
        sending = sum(ref.nbytes for ref in self._sending if ref.alive)
        waiting = sum(buffer.nbytes for _, buffers in self._posted.values() for buffer in buffers)
        self.peak_bytes = max(self.peak_bytes, sending + waiting)

    @property
    def idle(self) -> bool:
        return not self._here and not self._posted

    def flush(self) -> None:
        """Waits until every send has ended."""
        for sender in self._senders.values():
            sender.flush()

    def require_sound(self) -> None:
        """Raises what went wrong with a send so far. Does not wait for those under way."""
        for sender in self._senders.values():
            sender.require_sound()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


class _Sender:
    """Keeps the tensors of sends to one rank until the sends have ended. On CUDA it needs no thread, because `wait`
    does not block the host."""

    def __init__(self, device: torch.device) -> None:
        self._jobs: queue.SimpleQueue[tuple[Transfer | threading.Event, Tensor | None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._on_stream: deque[tuple[Transfer, Tensor]] | None = deque() if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._work, name="optpipe-send", daemon=True)
        if self._on_stream is None:
            self._thread.start()

    def put(self, transfer: Transfer, tensor: Tensor) -> None:
        if self._on_stream is None:
            self._jobs.put((transfer, tensor))
            return
        self._on_stream.append((transfer, tensor))
        while self._on_stream and self._on_stream[0][0].is_completed():
            self._on_stream.popleft()[0].wait()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            awaited, tensor = job
            try:
                awaited.set() if isinstance(awaited, threading.Event) else awaited.wait()
            except BaseException as error:
                self._error = error
            del job, awaited, tensor

    def flush(self) -> None:
        if self._on_stream is None:
            reached = threading.Event()
            self._jobs.put((reached, None))
            reached.wait()
        else:
            while self._on_stream:
                self._on_stream.popleft()[0].wait()
        self.require_sound()

    def require_sound(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._on_stream is None:
            self._jobs.put(None)
            self._thread.join()
