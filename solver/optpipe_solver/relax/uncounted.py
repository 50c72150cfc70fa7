"""`uncounted`: the inner functions of a compiled search, which count no references to arrays.

numba counts the references to each array of a named tuple at each call. That took three quarters of a search's time.
Where a function makes no arrays it is of no use: its caller holds them. `_nrt` is no public name of numba's; a version
that does not know it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def uncounted(function: Function) -> Function:
    """Return the function as `compiled` functions call it; as it is where there is no numba.

    It must not make arrays: no slices that are assigned to, no `numpy.zeros`. It is kept on disk with what calls it.
    """
    try:
        import numba
    except ImportError:
        return function
    try:
        return numba.njit(_nrt=False, nogil=True)(function)  # type: ignore[no-any-return]
    except (KeyError, TypeError):
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
