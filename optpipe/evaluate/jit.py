"""Inner loops that start as plain Python and are compiled by numba once there is enough work to pay for it."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from types import FunctionType
from typing import Any, TextIO, TypeVar, cast

# Ops that are handled in plain Python, in about 0.1 s, before numba is imported, which takes about as long.
ENOUGH = 20_000
LOCK = "compiler"  # a file's name
LOOK_S = 0.05  # for which a process that looks whether it is locked locks it, at most
NO_LOCK = OSError, RuntimeError, ImportError  # the second where the user has no home

F = TypeVar("F", bound=Callable[..., Any])

_enough: float = ENOUGH
_for_all = False


def compile_at_once(for_all: bool = False) -> None:
    """Compiles in this process from now on, however little the work: a training may wait at its start, not later.

    With `for_all` this is the process that others do not repeat the work of (`compiles_elsewhere`).
    """
    global _enough, _for_all
    _enough, _for_all = 0, for_all


def load_compiled(loops: Iterable[str]) -> bool:
    """Uses machine code at once from now on, if an earlier process has compiled these loops; else compiles nothing in
    this process, however much the work: who waits for its answers does not wait for a compiler. Returns which."""
    global _enough
    _enough = inf if waits_for_compiler(loops) else 0
    return _enough == 0


class LazyJit:
    """Calls `function(*args)`. After `ENOUGH` units of `work` the same source is compiled; the results are the same."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._work = 0

    def __call__(self, work: int, *args: Any) -> Any:
        self._work += work
        if self._compiled is None and self._work > _enough and not compiles_elsewhere():
            self._compiled = compiled(self._function)  # one store: threads may come here together
        return (self._compiled or self._function)(*args)


def compiled(function: F) -> F:
    """The function, compiled by numba at its first call from Python; as it is where there is no numba.

    The machine code is kept on disk with all that it calls, in a folder named by this machine and by the contents of
    all files beside the function's and of those here, where all that it calls is; numba itself looks at the function's
    own file only. While it runs, other threads do, too.
    """
    try:
        import numba
    except ImportError:  # as where only a GPU is measured (docs/gpu.md): the same, but slower
        return function
    with _numbas_folder:
        before = numba.config.CACHE_DIR
        try:
            numba.config.CACHE_DIR = str(_kept_in(Path(function.__code__.co_filename).parent))
            return cast(F, numba.njit(cache=True, nogil=True)(function))
        except RuntimeError:  # no folder to cache it in can be written: compiled anew in each process
            return cast(F, numba.njit(nogil=True)(function))
        finally:
            numba.config.CACHE_DIR = before


def compiled_part(function: F) -> F:
    """As `compiled`, for what only compiled functions call and makes no arrays: no `numpy.zeros`, no array that is
    assigned to a slice. Not for what is called in many places: it is inlined in each.

    numba then neither writes code that takes arguments from Python, nor passes them on, nor counts the references to
    each array that is passed on or read from a tuple. For named tuples of many arrays all that takes as long as the
    work: without it the clock of the list scheduler takes half the time. `_nrt` is no public name of numba's.
    """
    try:
        import numba
    except ImportError:
        return function
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "forceinline": True}
    return cast(F, numba.njit(nogil=True, **options)(function))


@cache
def plain(function: F) -> F:
    """The function as Python itself runs it, with all that it calls: slower, but nothing waits for a compiler."""
    source = getattr(function, "py_func", None)
    if source is None:
        return function
    names = {name: plain(source.__globals__[name]) for name in source.__code__.co_names if name in source.__globals__}
    return cast(F, FunctionType(source.__code__, {**source.__globals__, **names}, source.__name__))


def waits_for_compiler(loops: Iterable[str]) -> bool:
    """Whether a call of one of these functions, each as "module:function", waits for a compiler: neither this process
    nor an earlier one has compiled it. That takes some seconds, once on a machine."""
    for loop in loops:
        module, _, name = loop.partition(":")
        function = getattr(import_module(module), name)
        if getattr(function, "signatures", True):  # compiled in this process; or no numba, or switched off
            continue
        file = Path(function.py_func.__code__.co_filename)
        try:
            with _numbas_folder:
                kept = _kept_in(file.parent)
        except RuntimeError:  # no folder can be written
            return True
        if not any(kept.glob(f"*/{file.stem}.{name}-*.nbc")):
            return True
    return False


def compiler_lock() -> TextIO | None:
    """Return a file that is locked until all processes that inherit it have ended: for the one that compiles all loops.
    None if another process has it, or no file can be written."""
    with ExitStack() as unless_locked:
        try:
            _users().mkdir(parents=True, exist_ok=True)
            file = unless_locked.enter_context((_users() / LOCK).open("w"))
            try:
                _lock(file)
            except BlockingIOError:
                time.sleep(LOOK_S)  # who only looks has it for a moment
                _lock(file)
        except NO_LOCK:
            return None
        unless_locked.pop_all()
    return file


def _lock(file: TextIO, shared: bool = False) -> None:
    """Locks the file. Raises one of `NO_LOCK`: BlockingIOError if another process has locked it."""
    import fcntl  # not on Windows: there each process compiles for itself

    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def compiles_elsewhere() -> bool:
    """Whether another process compiles all loops just now, so that this one need not."""
    if _for_all:
        return False
    try:
        with (_users() / LOCK).open() as file:
            _lock(file, shared=True)
    except NO_LOCK as error:  # or no process ever did
        return isinstance(error, BlockingIOError)
    return False


def _users() -> Path:
    """The user's folder for compiled code. Raises RuntimeError if there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe"


_numbas_folder = threading.Lock()


def _kept_in(folder: Path) -> Path:
    """Where the code compiled of the functions in a folder is kept: beside them, unless that cannot be written."""
    import numba

    beside = folder / "__pycache__" if os.access(folder, os.W_OK) else _users()
    return Path(numba.config.CACHE_DIR or beside) / f"optpipe-{_digest(folder)}"


@cache
def _digest(folder: Path) -> str:
    """Of the contents of all Python files in the folder and in this one, and of what compiles for which machine."""
    import numba
    from llvmlite import binding

    cpu = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    machine = f"{sys.version_info[:2]} {numba.__version__} {numba.config.CPU_NAME or cpu}"
    files = sorted(path for each in {folder, Path(__file__).parent} for path in each.glob("*.py") if path.is_file())
    return hashlib.sha256(b"\0".join([machine.encode(), *(path.read_bytes() for path in files)])).hexdigest()[:16]
