"""Compiled functions: what is kept on disk is what would be compiled now."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optpipe.dispatch.descents import LOOPS
from optpipe.evaluate import jit
from optpipe.evaluate.jit import ENOUGH, LazyJit

CALLER = """
from optpipe.evaluate.jit import compiled, compiled_part, waits_for_compiler
import called

inner = compiled_part(called.inner)

@compiled
def outer(x):
    return inner(x) + 1

waits = waits_for_compiler(["__main__:outer"])
value = outer(1)
found = sum(getattr(outer, "stats").cache_hits.values()) if hasattr(outer, "stats") else -1
print(value, found, int(waits), int(waits_for_compiler(["__main__:outer"])))
"""


def run(folder: Path, script: str = "caller.py", **environment: str) -> list[int]:
    """What a script prints in a new process; of the caller, what `outer(1)` is, how often it was found on disk, and
    whether it waited for a compiler before and after."""
    path = os.pathsep.join([str(folder), *sys.path])
    own = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, folder / script]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text("def inner(x):\n    return x * 2\n")
    return tmp_path


@pytest.mark.parametrize("cache", ["", "elsewhere"])
def test_what_is_compiled_is_kept_until_a_function_that_it_calls_changes(folder: Path, cache: str) -> None:
    where = {"NUMBA_CACHE_DIR": str(folder / cache)} if cache else {}
    assert run(folder, **where) == [3, 0, 1, 0]
    assert run(folder, **where) == [3, 1, 0, 0]
    written = (folder / "called.py").stat()
    (folder / "called.py").write_text("def inner(x):\n    return x * 5\n")
    os.utime(folder / "called.py", ns=(written.st_atime_ns, written.st_mtime_ns))  # as a copy may have it
    assert run(folder, **where) == [6, 0, 1, 0]


EXAMPLE = Path(__file__).parents[2] / "examples" / "problems" / "fastlink-4x8.json"
FRESH = f"""
from optpipe import Problem
from optpipe.dispatch.descents import LOOPS
from optpipe.evaluate.jit import waits_for_compiler
from optpipe.reuse import adapt
from optpipe_solver.heuristics import generate

problem = Problem.load({str(EXAMPLE)!r})
adapt(problem, generate("naive", problem, "makespan")).makespan_ms
print(int(waits_for_compiler(LOOPS)))
"""


def test_nobody_waits_for_a_compiler_who_looks_a_schedule_up(tmp_path: Path) -> None:
    (tmp_path / "fresh.py").write_text(FRESH)
    assert run(tmp_path, "fresh.py", NUMBA_CACHE_DIR=str(tmp_path)) == [1]
    assert not list(tmp_path.rglob("clock.*"))


def test_numba_may_be_switched_off(folder: Path) -> None:
    assert run(folder, NUMBA_DISABLE_JIT="1") == [3, -1, 0, 0]


def test_without_numba_a_loop_runs_as_plain_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    loop = LazyJit(lambda x: x + 1)
    assert [loop(10**9, x) for x in (1, 2)] == [2, 3]


def test_a_loop_is_compiled_even_where_no_cache_can_be_written():
    here: dict[str, Any] = {}
    # A function without a file: numba finds no folder for its cache.
    exec("def twice(number):\n    return 2 * number", here)
    loop = LazyJit(here["twice"])
    assert loop(ENOUGH + 1, 21) == 42
    assert loop._compiled not in (None, here["twice"])


def test_threads_that_call_a_loop_together_compile_no_compiled_one(monkeypatch):
    """Another thread may come between any two stores: here a call follows each of them."""

    class Interrupted(LazyJit):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name != "_work" and "_work" in self.__dict__:
                assert self(0, 1) == 2

    def plain(x):
        return x + 1

    given_to_numba = []
    monkeypatch.setattr(jit, "compiled", lambda function: given_to_numba.append(function) or (lambda x: x + 1))
    assert Interrupted(plain)(ENOUGH + 1, 1) == 2
    assert given_to_numba == [plain]


def test_a_user_without_a_home_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert jit.compiler_lock() is None
    assert not jit.compiles_elsewhere()
    monkeypatch.setattr(os, "access", lambda *_: False)  # nor can anything be written beside the code
    assert jit.compiled(lambda number: number + 1)(1) == 2
    jit.waits_for_compiler(LOOPS)  # raises nothing


def test_without_locks_of_files_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on Windows, where these modules do not exist: all that the core, the solver and the commands import loads."""
    code = """
import pkgutil, psutil, sys  # psutil is another one there
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"))
import optpipe, optpipe_cli, optpipe_solver
for package in (optpipe, optpipe_cli, optpipe_solver):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
from optpipe.evaluate import jit
print(jit.compiler_lock(), jit.compiles_elsewhere())
"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("None False\n", "")


def test_a_look_does_not_keep_the_compiler_from_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = jit.compiler_lock()
    assert lock
    lock.close()
    with (tmp_path / "optpipe" / jit.LOCK).open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr(jit.time, "sleep", lambda s: fcntl.flock(looks, fcntl.LOCK_UN))
        lock = jit.compiler_lock()
    assert lock
    lock.close()
