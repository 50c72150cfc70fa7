"""`FirstScheduleProcess`: a process of the solver (`python -m optpipe_solver.first`) that makes first schedules.

It is started before it is needed and answers one request after the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import structlog

from optpipe.errors import InputError, SolverError
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Refused, Request

log = structlog.get_logger("optpipe.server")

MODULE = "optpipe_solver.first"
INCUMBENTS_KEPT = 3  # per answer; the last one is the best, the others replace it if it is not valid


@dataclass
class Answer:
    """What a process answered to one request."""

    lower_bound_ms: float | None = None
    infeasible: str | None = None
    incumbents: deque[Incumbent] = field(default_factory=lambda: deque(maxlen=INCUMBENTS_KEPT))

    def add(self, frame: Frame) -> None:
        """Add one frame of the answer. Raises `InputError` if the process refused the request."""
        if isinstance(frame, Refused):
            raise InputError(frame.reason)
        if isinstance(frame, Bound):
            self.lower_bound_ms = max(frame.lower_bound_ms, self.lower_bound_ms or 0.0)
        elif isinstance(frame, Infeasible):
            self.infeasible = frame.reason
        elif isinstance(frame, Incumbent):
            self.incumbents.append(frame)


class FirstScheduleProcess:
    """A process that makes first schedules. If it ends or has to be ended, another one takes its place."""

    def __init__(self) -> None:
        self._reading = threading.Lock()  # held by the thread that reads the process's output
        self._lock = threading.Lock()  # guards the two fields below
        self._closed = False
        self._child: Child | None = Child(MODULE)

    def request(self, request: Request, deadline: float) -> Answer:
        """Send a request and return what the process answers before the deadline; call it from one thread at a time.

        Parameters
        ----------
        deadline
            By `time.monotonic`. The process is ended if its answer is not complete by then.

        Raises
        ------
        InputError
            If the process refuses the request.
        """
        answer = Answer()
        with self._reading:
            for _attempt in range(2):  # a second time if the process had ended before it read the request
                child, left_s = self.ensure_running(), deadline - time.monotonic()
                if child is None or left_s <= 0 or _receive(child, request, left_s, answer):
                    break
        return answer

    def ensure_running(self) -> Child | None:
        """Return the process, started again if it has ended; None after `close`."""
        with self._lock:
            if self._closed:
                return None
            if self._child is None or self._child.ended:
                if self._child:
                    self._child.close()
                self._child = Child(MODULE)
            return self._child

    def close(self) -> None:
        """End the process. A request in progress returns what it has."""
        with self._lock:
            self._closed, child = True, self._child
        if child:
            child.stop()
            with self._reading:
                child.close()


def _receive(child: Child, request: Request, left_s: float, answer: Answer) -> bool:
    """Collect a process's answer; return whether it answered anything. Ends it if it is late or writes no frames."""
    timer = threading.Timer(left_s, child.stop)
    timer.daemon = True
    timer.start()
    answered = False
    try:
        for frame in child.ask(request):
            answered = True
            answer.add(frame)
    except SolverError as error:
        log.warning("a first-schedule process failed", why=str(error))
        child.stop()
    finally:
        timer.cancel()
        timer.join()  # so that it cannot end the process during the next request
    return answered
