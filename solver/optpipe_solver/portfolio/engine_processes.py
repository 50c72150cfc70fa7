"""The engines' processes: started, listened to, stopped, and how much memory they hold."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from optpipe.errors import OptPipeError
from optpipe.process.child import Child
from optpipe.process.protocol import Frame, Note, Programs, Request
from optpipe.schedule import Schedule

ENGINE = "optpipe_solver.engines"
STOPPED = float("inf")

Message = Frame | OptPipeError | None  # what an engine's process sends; None is its end, however it came


@dataclass(eq=False)
class EngineProcess:
    """One engine's process."""

    engine: str
    child: Child
    threads: int
    start: Schedule | None  # the warm start
    deadline: float  # a moment of `time.monotonic` at which it is stopped; `STOPPED` from then on
    allotted_s: float
    began: float = field(default_factory=time.monotonic)  # to load, then to search
    spent_s: float | None = None  # of its time, by its own count
    gained: bool = False  # whether a schedule of its became the best
    report: Note | None = None  # its last, on how a search of it ended or how far it is

    @property
    def stopped(self) -> bool:
        return self.deadline == STOPPED

    def begins(self, deadline: float) -> None:
        """Its time begins now, unless it is stopped."""
        self.began = time.monotonic()
        if not self.stopped:
            self.deadline = deadline

    def goes_on(self, until: float) -> None:
        """Let it run until then at least, unless it is stopped."""
        if not self.stopped:
            self.deadline = max(self.deadline, until)

    @property
    def ended_early(self) -> bool:
        """Whether it ended by itself with more than half of its time left: it knew nothing more to do."""
        spent_s = time.monotonic() - self.began if self.spent_s is None else self.spent_s
        return not self.stopped and spent_s < self.allotted_s / 2


class EngineProcesses:
    """All engine processes of one search. Used from one thread."""

    def __init__(self) -> None:
        self.running: list[EngineProcess] = []
        self._inbox: queue.Queue[tuple[EngineProcess, Message]] = queue.Queue()

    def start(self, request: Request, start: Schedule | None, deadline: float, allotted_s: float) -> None:
        """Start the engine that the request's method names, from a schedule."""
        asked = request.model_copy(update={"warm_start": Programs.from_schedule(start) if start else None})
        process = EngineProcess(request.method, Child(ENGINE, asked), request.threads, start, deadline, allotted_s)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        self.running.append(process)

    def _listen(self, process: EngineProcess) -> None:
        try:
            for frame in process.child.frames():
                self._inbox.put((process, frame))
        except OptPipeError as error:
            self._inbox.put((process, error))
        finally:
            self._inbox.put((process, None))

    def stop(self, process: EngineProcess) -> None:
        """Stop an engine; `messages` still yields what it sent before."""
        if not process.stopped:
            process.deadline = STOPPED
            process.child.stop()

    def messages(self, wait_s: float = 0.0) -> Iterator[tuple[EngineProcess, Message]]:
        """Yield what engines have sent since the last call; wait for a first message, `wait_s` at most.

        Stops engines whose time is up.
        """
        for process in self.running:
            if time.monotonic() > process.deadline:
                self.stop(process)
        while True:
            try:
                process, message = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self.running.remove(process)
            yield process, message
            wait_s = 0.0

    def stop_all(self) -> Iterator[tuple[EngineProcess, Message]]:
        """Stop all engines, and yield what they sent before."""
        for process in self.running:
            self.stop(process)
        while self.running:
            yield from self.messages(1.0)

    def memory_bytes(self) -> dict[EngineProcess, int]:
        """Resident memory of each engine that is not stopped, with all processes that it started.

        Pages that processes share count for each of them.
        """
        return {process: _resident(process.child.pid) for process in self.running if not process.stopped}


def own_memory_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _resident(pid: int) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total
