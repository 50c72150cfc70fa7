"""Processes of tests: a port to listen on, how long a test waits for what they do, and whether they have ended."""

import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

import pytest

GRACE_S = 100.0  # what a busy machine may take to end a solver after its time limit
PORTS = range(10_000, 32_000)  # below those that systems give to connections, which would take it before a server does
T = TypeVar("T")


def free_port() -> int:
    """A port that was free a moment ago, and that no connection will be given.

    Another test may draw it, too, with a chance of one in thousands.
    """
    while True:
        port = SystemRandom().choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition: Callable[[], T | None], what: str = "", within_s: float = 240.0) -> T:
    """Wait until the condition is true; return its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen: {what or condition}"
        time.sleep(0.01)
    return value


def hold_timers(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object]) -> None:
    """Timers begin to count once `begin` returns, however long a busy machine takes to get there."""

    class Held(threading.Timer):
        def run(self) -> None:
            begin()
            super().run()

    monkeypatch.setattr(threading, "Timer", Held)


def over(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit code."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True


def allow_files(most: int) -> None:
    """Let this process have so many files; skip the test if the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < most:
        pytest.skip(f"the system allows {hard} files a process, {most} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
