"""`CpuGroup`: small collectives over CPU tensors and Python objects, with which all ranks of a pipeline agree.

Those of numbers are one collective, `share`: every rank gives a row of equally many numbers and gets the
rows of all. It is asynchronous: a rank can share something before a step and read the others' rows after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.ranks.team import Subgroup, Team, Transfer

T = TypeVar("T")

MOST_VALUES = 7  # of one call of `share`


class Shared:
    """One row of numbers from each rank, on its way."""

    def __init__(self, team: Team, method: str, table: Tensor, transfer: Transfer) -> None:
        self._team, self._method, self._table, self._transfer = team, method, table, transfer
        self._rows: list[list[int]] | None = None

    @property
    def rows(self) -> list[list[int]]:
        """The row of each rank. Waits until every rank has shared its own. If another rank has shared something else,
        it has called another method and may wait for this rank in there: ends the team, and raises `OptPipeError`."""
        if self._rows is None:
            self._transfer.wait()
            table: list[list[int]] = self._table.tolist()
            if len({row[0] for row in table}) > 1:
                raise OptPipeError(
                    self._team.fail(
                        f"rank {self._team.name} has called {self._method}, and another rank something else: all "
                        "ranks must call the same methods in the same order"
                    )
                )
            self._rows = [row[1:] for row in table]
        return self._rows

    def least(self, count: int) -> list[int]:
        """The minimum of each of the first `count` numbers over all ranks."""
        return [min(column) for column in zip(*self.rows, strict=True)][:count]


def on_each_rank(make: Callable[[], T], gather: Callable[[Any], list[Any]], describe: Callable[[Exception], str]) -> T:
    """See `CpuGroup.on_each_rank`. `gather` gives the values of all ranks that agree."""
    failure: Exception | None = None
    try:
        result = make()
    except Exception as error:
        failure = error
    messages = gather(None if failure is None else describe(failure))
    if failure is not None:
        raise failure
    for message in messages:
        if message is not None:
            raise InputError(message)
    return result


class CpuGroup:
    """A process group on CPU of all ranks of a team, one pipeline after the other. `rank` is this rank's number in it:
    0 is rank 0 of the first pipeline. `peers` is how many inner peers compute each stage, of which this rank is number
    `peer`. Every method but `enter` and `name_of` is collective."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._group = team.whole()
        self.rank, self.peer, self.peers = self._group.number, team.peer, len(team.inner)
        self._inner: Subgroup | None = None
        self._method = ""

    def name_of(self, rank: int) -> str:
        """How messages name a rank of this group."""
        return self._team.name_of(self._team.everyone[rank])

    def enter(self, method: str) -> None:
        """Notes the method that this rank runs from now on. `share` finds out whether all ranks run the same one."""
        self._method = method

    def share(self, *values: int, method: str = "") -> Shared:
        """Sends this rank's row, without waiting. All ranks must have called `method`; by default what they entered."""
        method = method or self._method
        table = torch.zeros(len(self._team.everyone), 1 + MOST_VALUES, dtype=torch.int64)
        # Ranks in different methods have different numbers of values, and must still send equally many bytes.
        table[self.rank, : 1 + len(values)] = torch.tensor([crc32(method.encode()), *values])
        return Shared(self._team, method, table, self._group.all_reduce(table))

    def minimum(self, *values: int) -> list[int]:
        return self.share(*values).least(len(values))

    def meet_peers(self) -> None:
        """Once, before `peers_agree`."""
        self._inner = self._team.peers() if self.peers > 1 else None

    def peers_agree(self, fine: bool) -> bool:
        """Whether this rank and all its inner peers are `fine`. Waits for these only."""
        if self._inner is None:
            return fine
        wrong = torch.tensor(int(not fine))
        self._inner.all_reduce(wrong).wait()
        return not wrong.item()

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

    def gather_from_peers(self, value: Any, number: int) -> list[Any]:
        """The value of rank `number` of each pipeline of the team, on every rank."""
        if self.peers == 1:
            return [self.broadcast(value, number)]
        return [values[number] for values in self.gather_by_peer(value)]

    def on_each_rank(self, make: Callable[[], T]) -> T:
        """What `make` returns here. If it fails on any rank, the others raise an `InputError` that says so."""
        return on_each_rank(make, self.gather, self._team.describe)

    def require_equal(self, **values: Any) -> None:
        """Raises `InputError` if a value differs between ranks, which would then wait for each other for ever."""
        first, *others = self.gather(values)
        for rank, each in enumerate(others, 1):
            for name, value in each.items():
                if value != first[name]:
                    raise InputError(
                        f"{name} is {first[name]} on rank {self.name_of(0)} and {value} on rank {self.name_of(rank)}: "
                        "it must be the same on every rank"
                    )

    def all_equal(self, number: int | None) -> bool:
        """Whether every rank gives the same number of at most 63 bits. None is equal to nothing."""
        value = -1 if number is None else number
        least, minus_most = self.minimum(value, -value)
        return least >= 0 and least == -minus_most
