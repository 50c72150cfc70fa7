"""`WarmProcess`: a process of the solver that answers one request after the other, so that only the first one waits for
its imports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from optpipe.errors import SolverError
from optpipe.process.child import Child
from optpipe.process.protocol import CompareRequest, End, Frame, Refused, Request

log = structlog.get_logger("optpipe.server")

LOADING_S = 600.0  # how long a process may load and compile on a busy machine: one that takes longer hangs


class WarmProcess:
    """A process `python -m module`. If it ends or has to be ended, another one takes its place."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._reading = threading.Lock()  # held by the thread that reads the process's output
        self._lock = threading.Lock()  # guards the three fields below
        self._closed = False
        self._child: Child | None = None
        self._started = 0.0  # when that was

    def ask(self, request: Request | CompareRequest, deadline: float, add: Callable[[Frame], None]) -> bool:
        """Send a request; return whether the answer was complete. Call it from one thread at a time.

        Parameters
        ----------
        deadline
            By `time.monotonic`. The process is ended if its answer is not complete by then; one that is still loading
            goes on, for the next request.
        add
            Called with each frame of the answer. What it raises is raised.
        """
        with self._reading:
            for _attempt in range(2):  # a second time if the process had ended before it read the request
                child, left_s = self.ensure_running(), deadline - time.monotonic()
                if child is None or left_s <= 0:
                    break
                if not self._is_ready(child, left_s):
                    continue
                answered, whole = _receive(child, request, deadline - time.monotonic(), add)
                if answered:
                    return whole
        return False

    def _is_ready(self, child: Child, left_s: float) -> bool:
        """Wait for it, but not beyond the deadline. Ends a process that never gets there."""
        try:
            if child.ready_within(left_s):
                return True
        except SolverError as error:
            log.warning("a process of the solver did not start", module=child.module, why=str(error))
            child.stop()
        if time.monotonic() > self._started + LOADING_S:
            log.warning("a process of the solver was not ready in time", module=child.module, seconds=LOADING_S)
            child.stop()
        return False

    def ensure_running(self) -> Child | None:
        """Return the process, started again if it has ended; None after `close`."""
        with self._lock:
            if self._closed:
                return None
            if self._child is None or self._child.ended:
                if self._child:
                    self._child.close()
                self._child, self._started = Child(self._module), time.monotonic()
            return self._child

    def close(self) -> None:
        """End the process. A request in progress returns what it has."""
        with self._lock:
            self._closed, child = True, self._child
        if child:
            child.stop()
            with self._reading:
                child.close()


def _receive(
    child: Child, request: Request | CompareRequest, left_s: float, add: Callable[[Frame], None]
) -> tuple[bool, bool]:
    """Collect a process's answer; return whether it answered anything, and all. Ends it if it is late or writes no
    frames."""
    timer = threading.Timer(left_s, child.stop)
    timer.daemon = True
    timer.start()
    answered = whole = False
    try:
        for frame in child.ask(request):
            answered = True
            whole = isinstance(frame, End | Refused)
            add(frame)
    except SolverError as error:
        log.warning("a process of the solver failed", module=child.module, why=str(error))
        child.stop()
    finally:
        timer.cancel()
        timer.join()  # so that it cannot end the process during the next request
    return answered, whole
