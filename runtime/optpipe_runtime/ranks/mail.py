"""Messages between ranks: non-blocking sends, receives posted ahead, first in, first out per ordered pair of ranks.

Each ordered pair has a process group of its own, so that the two directions never wait for each other (a pair's NCCL
communicator has one stream for both). Sends never block the program: gloo completes a send only in `wait`, so a thread
per destination does that.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime.execute.lowering import Message
from optpipe_runtime.execute.stage import Spec, Tensors
from optpipe_runtime.memory.store import Memory
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Team, Transfer


class Mail:
    """One rank's messages. Making one is collective: every rank of the team calls it with the same layout."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        self._rank, self._device = team.number, device
        pairs = {(layout.placement[a], layout.placement[b]) for _, a, b in layout.passages()}
        neighbours = {(a, b) for a, b in pairs if a != b}
        self._groups = {
            pair: team.subgroup(pair, device) for pair in sorted(neighbours | {(b, a) for a, b in neighbours})
        }
        self._outboxes = {to: _Outbox(device) for sender, to in self._groups if sender == self._rank}
        self._here: dict[Message, Tensors] = {}
        self._posted: dict[Message, tuple[list[Transfer], Tensors]] = {}
        self._known: set[Message] = set()  # what has been posted in this step
        self._moving: deque[Memory] = deque()
        self.peak_bytes = 0  # receive buffers and sends under way, since `start_step`

    def start_step(self) -> None:
        self.peak_bytes = 0
        self._known.clear()

    def post(self, message: Message, source: int, specs: Sequence[Spec]) -> None:
        """Allocates the buffers of a message and starts to receive it; once a step."""
        if message in self._known:
            return
        buffers = tuple(spec.empty(self._device) for spec in specs)
        group = self._groups[source, self._rank]
        self._posted[message] = ([group.receive(buffer, source) for buffer in buffers], buffers)
        self._known.add(message)
        self._count()

    def take(self, message: Message) -> Tensors:
        """The tensors of a message, when they are there; the caller owns them."""
        if message in self._here:
            return self._here.pop(message)
        transfers, buffers = self._posted.pop(message)
        for transfer in transfers:
            transfer.wait()
        return buffers

    def discard(self, message: Message) -> None:
        """Receives what nobody needs any more, if it has not been taken yet."""
        if message in self._posted:
            self.take(message)

    def abandon(self) -> None:
        """Forgets what stages on this rank have handed over and none has taken."""
        self._here.clear()

    def send(self, message: Message, tensors: Tensors, to: int, specs: Sequence[Spec]) -> None:
        """Sends, or hands over to another stage on this rank."""
        for tensor, spec in zip(tensors, specs, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise InputError(
                    f"{message} has shape {list(tensor.shape)} and type {tensor.dtype}: it was {list(spec.shape)} "
                    f"and {spec.dtype} "
                    "at the start, and what passes between stages has the same shape in every micro-batch"
                )
        if to == self._rank:
            self._here[message] = tensors
            return
        group = self._groups[self._rank, to]
        for whole in [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]:
            self._moving.append(Memory(whole.untyped_storage()))
            self._outboxes[to].put(group.send(whole, to), whole)
        self._count()

    def _count(self) -> None:
        while self._moving and not self._moving[0].alive:
            self._moving.popleft()
        moving = sum(memory.nbytes for memory in self._moving if memory.alive)
        waiting = sum(buffer.nbytes for _, buffers in self._posted.values() for buffer in buffers)
        self.peak_bytes = max(self.peak_bytes, moving + waiting)

    @property
    def idle(self) -> bool:
        return not self._here and not self._posted

    def flush(self) -> None:
        """Waits until every send has ended."""
        for outbox in self._outboxes.values():
            outbox.flush()

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()


class _Outbox:
    """Keeps the tensors of sends to one rank until they have ended. On CUDA no thread is needed: `wait` blocks no
    host."""

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
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._on_stream is None:
            self._jobs.put(None)
            self._thread.join()
