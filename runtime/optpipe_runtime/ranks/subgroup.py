"""`Subgroup`: a process group of some ranks of a team. Who waits in it for a rank that is gone gets a `LostError`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from traceback import clear_frames
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.errors import OptPipeError


class LostError(OptPipeError):
    """A rank did not answer: its connection is closed, or it was silent for as long as the user's timeout.

    `absent` are the ranks of the team to which this rank has lost its connection, as far as it knows, by their numbers
    in the default group.
    """

    def __init__(self, why: str, absent: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.absent = absent


class Subgroup:
    """A process group of some of `ranks`, numbered as in that list. Raises `LostError` if the other side is gone.

    torch closes connections when nothing refers to the group or one of its works any more. So only this class holds
    them: an error that somebody keeps must not, in the frames of its traceback. (From Python 3.12 on a `LostError` is
    kept by a cycle of such frames until the garbage collector runs.)
    """

    def __init__(
        self, team: Any, members: Sequence[int], group: dist.ProcessGroup | None, ranks: Sequence[int]
    ) -> None:
        self._team, self._members, self._group, self._ranks = team, members, group, ranks  # a Team, which makes it
        self.number = ranks.index(dist.get_rank())  # of this rank
        self.on_gpus = group is not None and dist.get_backend(group) == "nccl"
        self._transfers: WeakSet[Transfer] = WeakSet()
        self._closing = threading.Lock()  # the watching thread closes groups that the main thread uses

    def meet(self, device: torch.device) -> None:
        """Lets every two members exchange a byte, in the same order on all ranks. NCCL connects two ranks at their
        first message, and the host then waits for the other host: inside a step that could be for ever. Not
        measured."""
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for a, b in combinations(self._members, 2):
            if self.number == a:
                self.send(byte, b).wait()
            elif self.number == b:
                self.receive(byte, a).wait()

    def send(self, tensor: Tensor, to: int) -> Transfer:
        with self.reporting_loss(to):
            return Transfer(self, dist.isend(tensor, self._ranks[to], group=self._open()), to)

    def receive(self, buffer: Tensor, source: int) -> Transfer:
        with self.reporting_loss(source):
            return Transfer(self, dist.irecv(buffer, self._ranks[source], group=self._open()), source)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Transfer:
        """In place."""
        with self.reporting_loss():
            return Transfer(self, dist.all_reduce(tensor, op, group=self._open(), async_op=True), None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies the tensor of rank `source` into that of every member."""
        with self.reporting_loss():
            dist.broadcast(tensor, self._ranks[source], group=self._open())

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The value of rank `source`, on every member."""
        box = [value if self.number == source else None]
        with self.reporting_loss():
            dist.broadcast_object_list(box, self._ranks[source], group=self._open())
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every member's value."""
        values: list[Any] = [None] * len(self._members)
        with self.reporting_loss():
            dist.all_gather_object(values, value, group=self._open())
        by_rank = dict(zip(sorted(self._ranks[member] for member in self._members), values, strict=True))  # torch sorts
        return [by_rank[self._ranks[member]] for member in self._members]

    def close(self) -> None:
        with self._closing:
            group, self._group = self._group, None
            # gloo's destructor waits for the group's collectives, and holds the interpreter: until all ranks take part.
            unfinished = [transfer._work for transfer in self._transfers if transfer.holds_up_closing]
            for transfer in self._transfers:
                transfer.forget()
        if group is not None and dist.is_initialized():
            if unfinished:
                threading.Thread(target=_destroy, args=(group, unfinished), name="optpipe-close", daemon=True).start()
            else:
                _destroy(group)

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise LostError(self.why_closed)
        if not dist.is_initialized():
            raise OptPipeError(
                "torch.distributed has been shut down (destroy_process_group) before this pipeline: call close "
                "before it"
            )
        return self._group

    @property
    def why_closed(self) -> str:
        return str(self._team.failure or "the pipeline is closed")

    @contextmanager
    def reporting_loss(self, other: int | None = None) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            clear_frames(error.__traceback__)  # those of torch's functions, which hold the group and its work
            if not isinstance(error, RuntimeError):
                raise
            text = str(error).rpartition("] ")[2] if "] " in str(error) else str(error)
            whom = "another rank" if other is None else f"rank {self._team.name_of(self._ranks[other])}"
            why = f"rank {self._team.name} lost its connection to {whom}: {text.partition('. ')[0]}"
            raise LostError(why, self._closed() if other is None else [self._ranks[other]]) from error

    def _closed(self) -> list[int]:
        """The members that gloo cannot send to, by their numbers in the default group."""
        closed = []
        for member in self._members:
            try:
                if self._group is not None and not self.on_gpus and member != self.number:
                    dist.isend(torch.zeros(1), self._ranks[member], group=self._group)
            except RuntimeError:
                closed.append(self._ranks[member])
        return closed


class Transfer:
    """One message, or one all-reduce, under way."""

    def __init__(self, subgroup: Subgroup, work: Any, other: int | None) -> None:
        self._subgroup, self._work, self._other = subgroup, work, other
        with subgroup._closing:
            subgroup._transfers.add(self)

    @property
    def holds_up_closing(self) -> bool:
        return self._other is None and not self._subgroup.on_gpus and not self.is_completed()

    def wait(self) -> None:
        """Call it once. On CUDA only the stream waits, not the host."""
        if self._work is None:
            raise LostError(self._subgroup.why_closed)
        try:
            with self._subgroup.reporting_loss(self._other):
                self._work.wait()
        finally:
            self.forget()

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def forget(self) -> None:
        self._work = None


def _destroy(group: dist.ProcessGroup, unfinished: Sequence[Any] = ()) -> None:
    for work in unfinished:
        with suppress(RuntimeError):
            work.wait()
    with suppress(RuntimeError, ValueError):  # its ranks are gone, or the user has destroyed it
        if dist.get_backend(group) == "nccl":
            group.abort()
        dist.destroy_process_group(group)
