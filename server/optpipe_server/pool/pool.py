"""`Pool`: a `ProcessPoolExecutor` whose tasks end in time, and which is replaced when one of its processes ends.

Processes come from a fork server that has imported what tasks need, so that a new one is soon ready. Each has a session
of its own, and ends when the pool is closed or its service ends, however that happens.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import anyio
import structlog

from optpipe.errors import OptPipeError
from optpipe_server.fork_server import start_fork_server
from optpipe_server.pool import schedules

T = TypeVar("T")

log = structlog.get_logger("optpipe.pool")

GRACE_S = 5.0  # a process that has not ended a task by itself is killed so long after the task's time
ANSWERS_S = 1.0  # for an answer to arrive after the task's time
LOOK_S = 0.5  # between two looks whether a task's answer is still wanted
TRIES = 2  # of a task whose process was killed, perhaps for another one's fault
MOST_BYTES = 2**32  # of data that a process may have
MOST_WAITING = 32  # slow tasks; each keeps what it was sent in memory
BUSY = "busy: retry in 10 s"  # too many tasks wait for their turn, or it would come too late
SLOW_S = 20.0  # for a slow task by default; a workbench takes one to two seconds for the largest problem


class TaskError(Exception):
    """A task has no answer; the message says why."""


class Pool:
    """Processes for tasks. All of it is used from one event loop.

    Tasks of seconds leave one process free, and those of minutes another one, so that nothing waits for a longer kind
    of task if there are three.
    """

    def __init__(self, processes: int) -> None:
        start_fork_server()
        self._context = multiprocessing.get_context("forkserver")
        self._processes = processes
        self._open, self._closing = self._context.Pipe(duplex=False)  # readable, at its end, once the pool is closed
        self._executor = self._started()
        self.slow = anyio.CapacityLimiter(max(1, processes - 1))
        self._longest = anyio.CapacityLimiter(max(1, processes - 2))

    @property
    def is_ready(self) -> bool:
        """Whether there are processes for tasks."""
        return self._executor.done()

    def _started(self) -> asyncio.Future[ProcessPoolExecutor]:
        """The processes, once the first one is there: its fork server takes some seconds on a busy machine."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[ProcessPoolExecutor] = loop.create_future()
        executor = ProcessPoolExecutor(self._processes, self._context, _begin, (self._open,))

        def start() -> None:
            with suppress(RuntimeError):  # the service has ended meanwhile
                try:
                    for _ in range(self._processes):  # a process starts for each task that finds none idle
                        executor.submit(os.getpid)
                    loop.call_soon_threadsafe(_settle, started, executor)
                except (OSError, EOFError, BrokenProcessPool) as error:
                    loop.call_soon_threadsafe(_settle, started, BrokenProcessPool(str(error)))

        threading.Thread(target=start, daemon=True).start()
        return started

    async def run(self, task: Callable[..., T], *arguments: Any, until: float, wanted: Path | None = None) -> T:
        """Return what the task returns in one of the processes.

        At `until`, by `time.monotonic`, it ends: `schedules.Late` is raised in it. So it does once there is no file
        `wanted` any more. Raises `OptPipeError` as the task does, and `TaskError` if it fails otherwise, does not end
        in time, or processes end before it does.
        """
        for _ in range(TRIES):
            executor = self._executor
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic()) + ANSWERS_S):
                    started = await asyncio.shield(executor)
                    return await asyncio.wrap_future(started.submit(_timed, task, arguments, until, wanted))
            except OptPipeError:
                raise
            except (TimeoutError, schedules.Late):
                raise TaskError("it was not done in time: retry in 10 s") from None
            except BrokenProcessPool as error:
                if executor is self._executor and not self._closing.closed:
                    log.warning("the pool is replaced: a process ended", task=task.__name__, why=str(error))
                    self._executor = self._started()
            except Exception as error:
                if not self._closing.closed:
                    log.exception("a task failed", task=task.__name__)
                raise TaskError("it failed, as the service's log tells") from error
        raise TaskError("its process ended before it was done: retry in 10 s")

    async def run_slow(
        self, task: Callable[..., T], *arguments: Any, limit_s: float | None = None, wanted: Path | None = None
    ) -> T:
        """As `run`, for a task that may take seconds, once its turn has come. Raises `TaskError`, too, if many wait."""
        if self.slow.statistics().tasks_waiting >= MOST_WAITING:
            raise TaskError(BUSY)
        async with self.slow:
            await asyncio.wait({self._executor})  # its time does not count what a new machine compiles
            return await self.run(task, *arguments, until=time.monotonic() + (limit_s or SLOW_S), wanted=wanted)

    async def run_longest(self, task: Callable[..., T], *arguments: Any, limit_s: float, wanted: Path) -> T:
        """As `run_slow`, for a task that may take minutes."""
        if self._longest.statistics().tasks_waiting:
            raise TaskError(BUSY)
        async with self._longest:
            return await self.run_slow(task, *arguments, limit_s=limit_s, wanted=wanted)

    async def close(self) -> None:
        """End the processes. Tasks that run raise `TaskError`."""
        self._closing.close()
        _settle(self._executor, BrokenProcessPool("the pool is closed"))
        if self._executor.exception() is None:
            await anyio.to_thread.run_sync(self._executor.result().shutdown)


def _settle(started: asyncio.Future[ProcessPoolExecutor], outcome: ProcessPoolExecutor | BrokenProcessPool) -> None:
    if started.done():
        return
    if isinstance(outcome, ProcessPoolExecutor):
        started.set_result(outcome)
    else:
        started.set_exception(outcome)


def _begin(is_open: Connection) -> None:
    """In a new process."""
    os.setsid()  # what a terminal sends to the service's processes is not for this one
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def end_with_the_pool() -> None:
        is_open.poll(None)
        os._exit(1)

    threading.Thread(target=end_with_the_pool, daemon=True).start()
    schedules.warm_up()


def _timed(task: Callable[..., T], arguments: tuple[Any, ...], until: float, wanted: Path | None) -> T:
    """In a process: the task, with `Late` raised in it once its time is over or nobody waits for it."""

    def look(*_: object) -> None:
        if time.monotonic() >= until or (wanted and not wanted.exists()):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise schedules.Late

    left_s = max(1e-3, until - time.monotonic())
    signal.signal(signal.SIGALRM, look)
    faulthandler.dump_traceback_later(left_s + GRACE_S, exit=True, file=2)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, min(left_s, LOOK_S) if wanted else left_s, LOOK_S)
            return task(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        faulthandler.cancel_dump_traceback_later()
