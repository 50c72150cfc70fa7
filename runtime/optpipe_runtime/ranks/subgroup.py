"""`Subgroup`: a process group of some ranks of a team. Who waits in it for a rank that is gone gets a `LostError`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe.errors import OptPipeError


class LostError(OptPipeError):
    """A rank did not answer: its process has ended, or it was silent for as long as the user's timeout."""


class Subgroup:
    """A process group of some of `ranks`, numbered as in that list. Raises `LostError` if the other side is gone."""

    def __init__(
        self, team: Any, members: Sequence[int], group: dist.ProcessGroup | None, ranks: Sequence[int]
    ) -> None:
        self._team, self._members, self._group, self._ranks = team, members, group, ranks  # a Team, which makes it
        self.number = ranks.index(dist.get_rank())  # of this rank
        self.on_gpus = group is not None and dist.get_backend(group) == "nccl"

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
            return Transfer(self, dist.isend(tensor, self._ranks[to], group=self._group), to)

    def receive(self, buffer: Tensor, source: int) -> Transfer:
        with self.reporting_loss(source):
            return Transfer(self, dist.irecv(buffer, self._ranks[source], group=self._group), source)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Transfer:
        """In place."""
        with self.reporting_loss():
            return Transfer(self, dist.all_reduce(tensor, op, group=self._group, async_op=True), None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies the tensor of rank `source` into that of every member."""
        with self.reporting_loss():
            dist.broadcast(tensor, self._ranks[source], group=self._group)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The value of rank `source`, on every member."""
        box = [value if self.number == source else None]
        with self.reporting_loss():
            dist.broadcast_object_list(box, self._ranks[source], group=self._group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every member's value."""
        values: list[Any] = [None] * len(self._members)
        with self.reporting_loss():
            dist.all_gather_object(values, value, group=self._group)
        by_rank = dict(zip(sorted(self._ranks[member] for member in self._members), values, strict=True))  # torch sorts
        return [by_rank[self._ranks[member]] for member in self._members]

    def close(self) -> None:
        """Ends the connections: torch closes them when nothing refers to the group any more."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # its ranks are gone, or the user has destroyed it
                dist.destroy_process_group(group)

    @contextmanager
    def reporting_loss(self, other: int | None = None) -> Iterator[None]:
        """Wraps communication with `other`; None: with all members."""
        if not dist.is_initialized():
            raise LostError(
                "torch.distributed has been shut down (destroy_process_group) before this pipeline: call close "
                "before it"
            )
        if self._group is None:
            raise LostError("this pipeline is closed")
        try:
            yield
        except RuntimeError as error:
            text = str(error).rpartition("] ")[2] if "] " in str(error) else str(error)
            whom = "another rank" if other is None else f"rank {self._team.name_of(self._ranks[other])}"
            why = f"rank {self._team.name} lost its connection to {whom}: {text.partition('. ')[0]}"
            raise LostError(why) from error


class Transfer:
    """One message, or one all-reduce, under way."""

    def __init__(self, subgroup: Subgroup, work: Any, other: int | None) -> None:
        self._subgroup, self._work, self._other = subgroup, work, other

    def wait(self) -> None:
        """Call it once. On CUDA only the stream waits, not the host."""
        with self._subgroup.reporting_loss(self._other):
            self._work.wait()
        self._work = None  # which holds the tensors

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())
