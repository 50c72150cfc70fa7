"""Inner loops that start as plain Python and are compiled by numba once there is enough work to pay for it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

# Ops that are handled in plain Python, in about 0.1 s, before numba is imported, which takes about as long.
ENOUGH = 20_000

F = TypeVar("F", bound=Callable[..., Any])

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
            self._compiled = compiled(self._function)  # one store: threads may come here together
        return (self._compiled or self._function)(*args)


def compiled(function: F) -> F:
    """The function, compiled by numba at its first call; as it is where there is no numba.

    What is compiled is kept on disk, in a folder named by the contents of all files beside the function's and of those
    here, where all that it calls is; numba itself looks at the function's own file only. While it runs, other threads
    do, too.
    """
    return _jit(function)


def compiled_in_place(function: F) -> F:
    """As `compiled`, for what works in place on named tuples of arrays and makes no arrays: no `numpy.zeros`, no slice
    that is assigned to.

    numba counts the references to each array anew wherever an array is passed on or read from a tuple. Without that the
    clock of the list scheduler takes a small part of the time. `_nrt` is no public name of numba's.
    """
    return _jit(function, _nrt=False)


def compiled_phase(function: F) -> F:
    """As `compiled_in_place`, for a part of such a loop: inlined where it is called."""
    return _jit(function, _nrt=False, forceinline=True)


def _jit(function: F, **options: bool) -> F:
    try:
        import numba
    except ImportError:  # as where only a GPU is measured (docs/gpu.md): the same, but slower
        return function
    folder = Path(function.__code__.co_filename).parent
    kept = Path(numba.config.CACHE_DIR or folder / "__pycache__") / f"optpipe-{_digest(folder)}"
    with _numbas_folder:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(kept)
        try:
            return cast(F, numba.njit(cache=True, nogil=True, **options)(function))
        except RuntimeError:  # no folder to cache it in can be written: compiled anew in each process
            return cast(F, numba.njit(nogil=True, **options)(function))
        finally:
            numba.config.CACHE_DIR = before


_numbas_folder = threading.Lock()


@cache
def _digest(folder: Path) -> str:
    """Of the contents of all Python files in the folder and in this one."""
    files = sorted(path for each in {folder, Path(__file__).parent} for path in each.glob("*.py") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
