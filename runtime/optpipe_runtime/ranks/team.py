"""`Team`: the ranks that train one model: those of a pipeline, numbered from 0, and their inner peers. With data
parallelism each replica is a team. `Subgroup`: a process group of some of its ranks.

A rank that fails raises its error, with a note that says where it was, and its process ends. That closes its
connections, so whoever waits for it gets a `LostError` at once. A rank that is frozen, or whose process goes on after
an error, ends the waits of the others after the timeout of `init_process_group`: all groups made
here take it over. On NCCL torch's watchdog then ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import OptPipeError
from optpipe_runtime.ranks.grid import find_grid, user_timeout
from optpipe_runtime.torch_private.groups import set_timeout


class LostError(OptPipeError):
    """A rank did not answer: its process has ended, or it was silent for as long as the user's timeout."""


class Subgroup:
    """A process group of some of `ranks`, numbered as in that list. Raises `LostError` if the other side is gone."""

    def __init__(
        self, team: Team, members: Sequence[int], group: dist.ProcessGroup | None, ranks: Sequence[int]
    ) -> None:
        self._team, self._members, self._group, self._ranks = team, members, group, ranks
        self.number = ranks.index(dist.get_rank())  # of this rank

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

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """In place: the sum."""
        with self.reporting_loss():
            return Transfer(self, dist.all_reduce(tensor, group=self._group, async_op=True), None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies the tensor of rank `source` into that of every member."""
        with self.reporting_loss():
            dist.broadcast(tensor, self._ranks[source], group=self._group)

    def broadcast_object(self, value: Any, source: int) -> Any:
        box = [value if self.number == source else None]
        with self.reporting_loss():
            dist.broadcast_object_list(box, self._ranks[source], group=self._group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
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


MOST_BLOCKS = 4  # thread blocks, so multiprocessors, of one NCCL message: some 80 GB/s. Not measured
_ended: list[Team] = []  # teams whose connections are still to be closed


class Team:
    """The ranks of a pipeline, a process group (all ranks if there is none), and those of its inner peers' pipelines.
    Making a team or a subgroup is collective over the ranks of all teams.

    `ranks` are those of this rank's pipeline, in which it is `number`; `peer` is its number among its inner peers,
    whose ranks are `inner`. `everyone` has the ranks of all pipelines of the team, one pipeline after the other.

    All ranks must make torch's groups in the same order. (`use_local_synchronization` does not help: it names a group
    by how many groups each member has made before, so members with different histories would wait for ever.) So every
    team makes the same subgroups in the same order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, inner: dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        self._timeout = user_timeout()
        self._grid = find_grid(group, inner)
        pipelines, self.peer = self._grid.team, self._grid.peer
        self.ranks = list(pipelines[self.peer])  # their numbers in the default group
        self.number = self.ranks.index(dist.get_rank())
        self.everyone = [rank for pipeline in pipelines for rank in pipeline]
        self.inner = [pipeline[self.number] for pipeline in pipelines]
        self.failure: str | None = None  # why the team has ended
        self._subgroups: list[Subgroup] = []

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, members: Iterable[int], device: torch.device) -> Subgroup:
        """Collective: a group of these members of the pipeline. This rank need not be one."""
        pipelines = [pipeline for team in self._grid.teams for pipeline in team]
        return self._subgroup(sorted(members), self.ranks, pipelines, device)

    def whole(self) -> Subgroup:
        """Collective: a process group of everyone in the team, numbered as in `everyone`, for tensors on CPU."""
        teams = [[rank for pipeline in team for rank in pipeline] for team in self._grid.teams]
        return self._subgroup(range(len(self.everyone)), self.everyone, teams, torch.device("cpu"))

    def peers(self) -> Subgroup:
        """Collective: a process group of this rank and its inner peers, numbered as in `inner`, for tensors on CPU."""
        sides = [[pipeline[k] for pipeline in team] for team in self._grid.teams for k in range(self.size)]
        return self._subgroup(range(len(self.inner)), self.inner, sides, torch.device("cpu"))

    def _subgroup(
        self, chosen: Sequence[int], own_ranks: list[int], all_ranks: Sequence[Sequence[int]], device: torch.device
    ) -> Subgroup:
        on_gpus = device.type == "cuda"
        own_group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            [[ranks[member] for member in chosen] for ranks in all_ranks],
            timeout=self._timeout,
            backend="nccl" if on_gpus else "gloo",
            pg_options=nccl_options(self._timeout) if on_gpus else None,
        )
        while _ended:  # making a group is collective, so all ranks have finished with earlier teams
            for ended in _ended.pop()._subgroups:
                ended.close()
        subgroup = Subgroup(self, chosen, own_group, own_ranks)
        self._subgroups.append(subgroup)
        if on_gpus and own_group is not None:
            subgroup.meet(device)
        return subgroup

    def end(self) -> None:
        """Marks the connections as no longer needed. They are closed when another team is made, because other ranks may
        still be in their last step."""
        _ended.append(self)

    @property
    def name(self) -> str:
        """How messages name this rank."""
        return self.name_of(self.ranks[self.number])

    def name_of(self, rank: int) -> str:
        """How messages name a rank of the team, by its number in the default group."""
        peer, number = divmod(self.everyone.index(rank), self.size)
        return f"{number} (inner peer {peer})" if len(self.inner) > 1 else str(number)

    # Failure

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Wraps what all ranks do together. An `OptPipeError` in here is one that all ranks raise; any other error, or
        the loss of a rank, ends the team."""
        if self.failure is not None:
            raise OptPipeError(f"this pipeline has failed, make a new one: {self.failure}")
        try:
            yield
        except LostError as lost:
            raise OptPipeError(self.fail(_message(lost))) from lost
        except OptPipeError:
            raise
        except BaseException as error:
            self.fail(self.describe(error))
            raise

    @contextmanager
    def local(self) -> Iterator[None]:
        """Wraps what this rank does by itself while the others do their part. Any error ends the team."""
        try:
            yield
        except LostError:
            raise
        except OptPipeError as error:
            self.fail(self.describe(error))
            raise

    def describe(self, error: BaseException) -> str:
        """Where this rank was, as far as its notes have it, and what happened."""
        return _message(error) if hasattr(error, "__notes__") else f"rank {self.name}: {_message(error)}"

    def fail(self, why: str) -> str:
        """Ends the team on this rank. Returns its first failure, which later calls report."""
        self.failure = self.failure or why
        return self.failure


def nccl_options(timeout: timedelta) -> Any:
    """The options of a group on GPUs. A message shares the GPU with compute, and is not urgent: it was sent ahead."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, MOST_BLOCKS
    set_timeout(options, timeout)
    return options


def _message(error: BaseException) -> str:
    """The error's first note, which says where it happened, and its text."""
    what = str(error) if isinstance(error, OptPipeError) else f"{type(error).__name__}: {error}"
    return ": ".join([*getattr(error, "__notes__", [])[:1], what])
