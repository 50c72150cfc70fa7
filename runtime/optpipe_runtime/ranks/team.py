"""`Team`: the ranks that train one model: those of a pipeline, numbered from 0, and their inner peers. With data
parallelism each replica is a team.

A rank that fails raises its error, with a note that says where it was, and its process ends. That closes its
connections, so whoever waits for it gets an error at once. A rank that is frozen, or whose process goes on after an
error, ends the waits of the others after the timeout that the user gave to `init_process_group`: all groups made here
take it over. On NCCL torch's watchdog then ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import OptPipeError
from optpipe_runtime.ranks.grid import find_grid
from optpipe_runtime.ranks.subgroup import LostError, Subgroup
from optpipe_runtime.torch_private.groups import set_timeout, timeouts

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
        self._grid = find_grid(group, inner, self._timeout)
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
        """Collective: a process group of these members of the pipeline, for tensors on `device`. This rank need not be
        a member."""
        return self._subgroup(sorted(members), self.ranks, self._grid.pipelines, device)

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
        on_gpus, own_group = device.type == "cuda", None
        for ranks in all_ranks:
            group = dist.new_group(
                [ranks[member] for member in chosen],
                backend="nccl" if on_gpus else "gloo",
                timeout=self._timeout,
                pg_options=nccl_options(self._timeout) if on_gpus else None,
            )
            if list(ranks) == own_ranks and own_ranks.index(dist.get_rank()) in chosen:
                own_group = group
        while _ended:  # making a group is collective, so all ranks have finished with earlier teams
            _ended.pop()._close()
        subgroup = Subgroup(self, chosen, own_group, own_ranks)
        self._subgroups.append(subgroup)
        if on_gpus and own_group is not None:
            subgroup.meet(device)
        return subgroup

    def end(self) -> None:
        """Marks the connections as no longer needed. They are closed when another team is made, because other ranks may
        still be in their last step."""
        _ended.append(self)

    def _close(self) -> None:
        for subgroup in self._subgroups:
            subgroup.close()

    @property
    def name(self) -> str:
        """How messages name this rank."""
        return self.name_of(self.ranks[self.number])

    def name_of(self, rank: int) -> str:
        """How messages name a rank of the team, given its number in the default group."""
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
        """Says where this rank was, if that is known, and what happened."""
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


def user_timeout() -> timedelta:
    """The one that the user gave to `init_process_group`. Groups of a mesh do not have it, but torch's default."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return min(timeouts(everyone), default=default_pg_timeout)


def _message(error: BaseException) -> str:
    """The error's first note, which says where it happened, and its text."""
    what = str(error) if isinstance(error, OptPipeError) else f"{type(error).__name__}: {error}"
    return ": ".join([*getattr(error, "__notes__", [])[:1], what])
