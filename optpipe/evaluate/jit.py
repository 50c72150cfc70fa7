"""Inner loops that start as plain Python and are compiled by numba once there is enough work to pay for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Ops that are handled in plain Python, in about 0.1 s, before numba is imported, which takes about as long.
ENOUGH = 20_000

_eager = False


def compile_at_once() -> None:
    """Compiles in this process from now on, however little the work: a training may wait at its start, not later."""
    global _eager
    _eager = True


class LazyJit:
    """Calls `function(*args)`. After `ENOUGH` units of `work` the same source is compiled; the results are the same."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._work = 0

    def __call__(self, work: int, *args: Any) -> Any:
        self._work += work
        if self._compiled is None and (_eager or self._work > ENOUGH):
            self.compiled_now()
        return (self._compiled or self._function)(*args)

    def compiled_now(self) -> Callable[..., Any]:
        """The compiled function, for others that are compiled, too."""
        found = self._compiled or compiled(self._function)
        self._compiled = found  # one store: threads may come here together
        return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled by numba at its first call; as it is where there is no numba.

    What is compiled is kept on disk until the function's own file changes. Who changes a function of another file that
    it calls deletes that, by `find . -name '*.nb[ic]' -delete`.
    """
    try:
        import numba
    except ImportError:  # as where only a GPU is measured (docs/gpu.md): the same, but slower
        return function
    try:
        return numba.njit(cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder to cache it in can be written: compiled anew in each process
        return numba.njit(function)  # type: ignore[no-any-return]
