"""What all ranks call together: if one rank fails, all fail, and if another rank has called another method, all are
told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from optpipe.errors import InputError
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import Team

P = ParamSpec("P")
R = TypeVar("R")


class CollectiveCalls:
    """The calls that the ranks of a team make together. `settle` ends what the last step has left to the next call."""

    def __init__(self, team: Team, cpu_group: CpuGroup, settle: Callable[[], None]) -> None:
        self._team, self._cpu_group, self._settle = team, cpu_group, settle
        self.closed = False

    @contextmanager
    def wrap(self, name: str) -> Iterator[None]:
        """Wraps one call."""
        if self.closed:
            raise InputError(f"{name} was called after close: this pipeline has ended, make a new one")
        with self._team.collective():
            self._cpu_group.enter(name)
            if name != "step":  # which votes itself
                self._cpu_group.minimum()
                self._settle()
            yield


class _Calling(Protocol):
    _calls: CollectiveCalls


Caller = TypeVar("Caller", bound=_Calling)


def collective(method: Callable[Concatenate[Caller, P], R]) -> Callable[Concatenate[Caller, P], R]:
    """Marks methods that all ranks call."""

    @wraps(method)
    def together(self: Caller, /, *arguments: P.args, **options: P.kwargs) -> R:
        with self._calls.wrap(method.__name__):
            return method(self, *arguments, **options)

    return together
