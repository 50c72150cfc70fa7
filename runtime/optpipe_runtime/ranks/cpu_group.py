"""`CpuGroup`: small collectives over CPU tensors and Python objects, with which all ranks of a pipeline agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.ranks.team import Team

T = TypeVar("T")

MOST_VALUES = 6  # of one call of `minimum`


class CpuGroup:
    """A process group on CPU of all ranks of a team, one pipeline after the other.

    `rank` is this rank's number in it: 0 is rank 0 of the first pipeline. `peers` is how many inner peers compute each
    stage, of which this rank is number `peer`. Every method but `enter` and `name_of` is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.whole()
        self.rank, self.peer, self.peers = self._group.number, team.peer, len(team.inner)
        self._method = ""

    def name_of(self, rank: int) -> str:
        """How messages name a rank of this group."""
        return self._team.name_of(self._team.everyone[rank])

    def enter(self, method: str) -> None:
        """Notes the method that this rank runs from now on. `minimum` finds out whether all ranks run the same one."""
        self._method = method

    def minimum(self, *values: int) -> list[int]:
        """The minimum of each value over all ranks. Raises `OptPipeError` on every rank if ranks run different
        methods."""
        number = crc32(self._method.encode())
        # Ranks in different methods have different numbers of values, and must still send equally many bytes.
        unused = [0] * (MOST_VALUES - len(values))
        votes = torch.tensor([number, -number, *values, *unused], dtype=torch.int64)
        self._group.all_reduce(votes, dist.ReduceOp.MIN).wait()
        first, minus_last, *least = (int(vote) for vote in votes)
        if first != -minus_last:
            raise OptPipeError(
                f"rank {self._team.name} has called {self._method}, and another rank something else: all ranks "
                "must call the same methods in the same order"
            )
        return least[: len(values)]

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank `source`, on every rank."""
        return self._group.broadcast_object(value, source)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self._group.gather_objects(value)

    def gather_by_peer(self, value: Any) -> list[list[Any]]:
        """Every rank's value, for each pipeline of the team by the rank's number in it."""
        values, size = self.gather(value), self._team.size
        return [values[first : first + size] for first in range(0, len(values), size)]

    def of_each_peer(self, value: Any, number: int) -> list[Any]:
        """The value of rank `number` of each pipeline of the team, on every rank."""
        if self.peers == 1:
            return [self.broadcast(value, number)]
        return [values[number] for values in self.gather_by_peer(value)]

    def on_each_rank(self, make: Callable[[], T]) -> T:
        """What `make` returns here. If it fails on any rank, the others raise an `InputError` that says so."""
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        messages = self.gather(None if failure is None else self._team.describe(failure))
        if failure is not None:
            raise failure
        for message in messages:
            if message is not None:
                raise InputError(message)
        return made

    def all_equal(self, number: int | None) -> bool:
        """Whether every rank gives the same number of at most 63 bits. None is equal to nothing."""
        own = -1 if number is None else number
        least, minus_most = self.minimum(own, -own)
        return least >= 0 and least == -minus_most
