"""`FirstScheduleProcess`: a process of the solver (`python -m optpipe_solver.first`) that makes first schedules.

It is started before it is needed and answers one request after the other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from optpipe.errors import InputError
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Refused, Request
from optpipe_server.warm_process import WarmProcess

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


class FirstScheduleProcess(WarmProcess):
    """A process that makes first schedules, started at once."""

    def __init__(self) -> None:
        super().__init__(MODULE)
        self.ensure_running()

    def request(self, request: Request, deadline: float) -> Answer:
        """Return what the process answers before the deadline (`ask`). Raises `InputError` if it refuses the
        request."""
        answer = Answer()
        self.ask(request, deadline, answer.add)
        return answer
