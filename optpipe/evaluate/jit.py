"""Inner loops that start as plain Python and become machine code once there is enough work to pay for importing
numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# ops handled in plain Python (about 0.1 s) before numba is imported (about as long, compiled code cached on disk)
ENOUGH = 20_000


_eager = False


def compile_at_once() -> None:
    """From now on, in this process: for a training, whose first schedule may take a moment to check, and a later one
    may not."""
    global _eager
    _eager = True


class LazyJit:
    """Calls `function(*args)`; after `ENOUGH` units of `work` it is compiled, by the same source and with the same
    results."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled = False
        self._work = 0

    def __call__(self, work: int, *args: Any) -> Any:
        self._work += work
        if not self._compiled and (_eager or self._work > ENOUGH):
            import numba

            try:
                self._function = numba.njit(cache=True)(self._function)
            except (
                RuntimeError
            ):  # no folder that can be written, neither beside the source nor at home: compiled anew in each process
                self._function = numba.njit(self._function)
            self._compiled = True
        return self._function(*args)
