"""`Team`: the ranks of one pipeline, numbered from 0. Where replicas of a pipeline train side by side (data parallel), each is a team."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from optpipe.errors import InputError


class Team:
    """The ranks of a process group; without one, all. Making one, and a subgroup, is collective over the ranks of all teams.

    torch's groups are made by all ranks in the same order (`use_local_synchronization` names a group by how many each member has made
    before, so that members with other pasts wait for ever), so teams are replicas: each makes the same subgroups in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and dist.get_rank(group) < 0:
            raise InputError(f"group: rank {dist.get_rank()} is no member of it; every rank gives the group of its own pipeline")
        self.ranks = dist.get_process_group_ranks(group)  # as the default group numbers them
        self.number = dist.get_rank(group)
        self._teams = [self.ranks]
        if group is not None:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, self.ranks)
            self._teams = [list(team) for team in sorted({tuple(ranks) for ranks in told})]
            if (
                sorted(rank for team in self._teams for rank in team) != list(range(len(told)))
                or len({len(team) for team in self._teams}) > 1
            ):
                raise InputError(f"group: pipelines of ranks {self._teams}; every rank is in one of them, and all are equally long")

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, members: Iterable[int], device: torch.device) -> Any:
        """A process group of its own for tensors on `device`, of these members of this team, which need not include this rank."""
        chosen, own = sorted(members), None
        for team in self._teams:
            made = dist.new_group([team[member] for member in chosen], backend="nccl" if device.type == "cuda" else "gloo")
            if team == self.ranks:
                own = made
        return own
