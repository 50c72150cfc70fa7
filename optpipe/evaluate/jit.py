"""Inner loops that start as plain Python and are compiled by numba once there is enough work to pay for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
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

    What is compiled is kept on disk until a file changes in the function's folder or in this one, where all that it
    calls is.
    """
    try:
        import numba
    except ImportError:  # as where only a GPU is measured (docs/gpu.md): the same, but slower
        return function
    try:
        found = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder to cache it in can be written: compiled anew in each process
        return numba.njit(function)  # type: ignore[no-any-return]
    _forget_if_changed(function, Path(found.stats.cache_path))
    return found  # type: ignore[no-any-return]


def _forget_if_changed(function: Callable[..., Any], cache: Path) -> None:
    """Delete what was compiled of the function before any of those files changed; numba looks at its own only."""
    own = Path(function.__code__.co_filename)
    with suppress(OSError):  # another process was first, or the cache cannot be changed
        sources = (source for folder in (own.parent, Path(__file__).parent) for source in folder.glob("*.py"))
        times, now = (source.stat().st_mtime for source in sources), time.time()
        changed_at = max((at for at in times if at <= now), default=0.0)  # a clock that was wrong costs no compilation
        for index in cache.glob(f"{own.stem}.{function.__name__}-*.nbi"):
            if index.stat().st_mtime < changed_at:
                index.unlink()
