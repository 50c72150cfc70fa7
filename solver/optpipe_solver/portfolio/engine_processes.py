"""The engines that run at the moment: processes, what they tell, and what they hold together."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from optpipe.errors import OptPipeError
from optpipe.process.child import Child, Frame, Programs, Request
from optpipe.schedule import Schedule

ENGINE = "optpipe_solver.engine"
MIB = 2**20

Word = Frame | OptPipeError | None  # what an engine says; None is its end, however it came


@dataclass(eq=False)
class Worker:
    """One engine's process."""

    engine: str
    child: Child
    threads: int
    start: Schedule | None  # from where it goes on
    until: float  # monotonic clock: then it is ended; infinity once it is
    given_s: float
    began: float = field(default_factory=time.monotonic)
    spent_s: float | None = None  # of it, by its own count
    listener: threading.Thread | None = None

    @property
    def gave_back(self) -> bool:
        """Whether it ended by itself with more than half of its time left: it knew nothing more to do."""
        spent_s = time.monotonic() - self.began if self.spent_s is None else self.spent_s
        return self.until < float("inf") and spent_s < self.given_s / 2


class Crew:
    """Starts engines, hears them, ends them. Used from one thread."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._inbox: queue.Queue[tuple[Worker, Word]] = queue.Queue()

    def start(self, request: Request, start: Schedule | None, until: float, given_s: float) -> None:
        """Starts the engine that the request's method names, from a schedule."""
        asked = request.model_copy(update={"warm_start": Programs.of(start) if start else None})
        worker = Worker(request.method, Child(ENGINE, asked), request.threads, start, until, given_s)
        worker.listener = threading.Thread(target=self._listen, args=(worker,), daemon=True)
        worker.listener.start()
        self.workers.append(worker)

    def _listen(self, worker: Worker) -> None:
        try:
            for frame in worker.child.frames():
                self._inbox.put((worker, frame))
        except OptPipeError as error:
            self._inbox.put((worker, error))
        finally:
            self._inbox.put((worker, None))

    def dismiss(self, worker: Worker) -> None:
        """Ends an engine; what it told before is still in the news."""
        if worker.until < float("inf"):
            worker.until = float("inf")
            worker.child.stop()

    def news(self, wait_s: float = 0.0) -> Iterator[tuple[Worker, Word]]:
        """What engines have told since; where that is nothing, waits for the first word, `wait_s` at most."""
        for worker in self.workers:
            if time.monotonic() > worker.until:
                self.dismiss(worker)
        while True:
            try:
                worker, word = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return
            if word is None:
                self.workers.remove(worker)
            yield worker, word
            wait_s = 0.0

    def end(self) -> Iterator[tuple[Worker, Word]]:
        """Ends all engines; what they told before is told."""
        for worker in self.workers:
            self.dismiss(worker)
        while self.workers:
            yield from self.news(1.0)

    def held_bytes(self) -> dict[Worker, int]:
        """Resident memory of each engine that is not dismissed, with all that it started; shared pages count for each
        process."""
        return {worker: _resident(worker.child.pid) for worker in self.workers if worker.until < float("inf")}


def own_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _resident(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
