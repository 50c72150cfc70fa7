"""`Compiler`: where nothing is compiled yet, a process compiles it for all others, and nobody waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import structlog

from optpipe import solvers
from optpipe.dispatch.descents import LOOPS
from optpipe.evaluate.jit import compiler_lock, compiles_elsewhere, load_compiled
from optpipe.process import process_tree
from optpipe.process.background import be_nicer

log = structlog.get_logger("optpipe.server")

LOOK_S = 0.5  # between two looks whether it is done


class Compiler:
    """Loads what is compiled; else lets a process compile it, once on a machine, and loads it then.

    Until then this process runs as plain Python, and searches do without the engines that wait for it. `load` is called
    once there is something to load.
    """

    def __init__(self, load: Callable[[], object] = lambda: None) -> None:
        self._load, self._mark, self._over = load, process_tree.new_mark(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="compiler", daemon=True).start()  # numba takes a moment to import

    def _run(self) -> None:
        began = time.monotonic()
        if not load_compiled(LOOPS):
            log.info("compiles what searches run, once on this machine")
            if lock := compiler_lock():  # else another service does it
                with lock:  # the process has it from now on
                    self._process = _compiling(self._mark, lock.fileno())
            while compiles_elsewhere():
                if self._over.wait(LOOK_S):
                    return
            if not load_compiled(LOOPS):
                log.warning("nothing was compiled: searches compile it themselves")
                return
            log.info("compiled", seconds=round(time.monotonic() - began))
        self._load()

    def stop(self) -> None:
        self._over.set()
        process_tree.end(self._mark)
        if self._process is not None:
            self._process.wait()


def _compiling(mark: str, lock: int) -> subprocess.Popen[bytes]:
    """The process that compiles."""
    process = subprocess.Popen(
        [sys.executable, "-m", solvers.installed().COMPILE],
        env=process_tree.environment(mark),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[lock],
    )
    be_nicer(process.pid)
    return process
