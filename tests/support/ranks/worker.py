"""Rank processes over gloo on loopback. Each runs the functions that it is sent, and answers with their results. One
whose function raises ends, as a training script does."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from support.processes import GRACE_S
from support.ranks.device import ON_CUDA

STARTER = multiprocessing.get_context("forkserver")  # torch is imported once, so that ranks start in milliseconds
PRELOADED = "support.ranks.preload"
TESTS = str(Path(__file__).parents[2])


def serve(
    connection: Connection, rank: int, world: int, store: str, timeout_s: float, environment: dict[str, str]
) -> None:
    assert PRELOADED in sys.modules
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    import torch
    import torch.distributed as dist

    from optpipe import anytime

    torch.set_num_threads(1)
    anytime.GRACE_S = GRACE_S
    if ON_CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_CUDA else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    while (request := connection.recv()) is not None:
        function, arguments, ends = request
        try:
            connection.send((True, function(**arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
            ends = True
        if ends:
            os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


_fork_server: int | None = None  # the process that ranks are forked from


def ensure_fork_server() -> None:
    """Start the fork server of ranks. A process has one: that of a service's pool has loaded something else, and is
    replaced."""
    global _fork_server
    running = forkserver._forkserver  # type: ignore[attr-defined]
    if _fork_server is None or running._forkserver_pid != _fork_server:
        running._stop()
        STARTER.set_forkserver_preload([PRELOADED])
        with pytest.MonkeyPatch.context() as patch:  # Python 3.11 hands it no `sys.path`
            patch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
            forkserver.ensure_running()
        _fork_server = running._forkserver_pid


TIMEOUT_S = 500.0  # of a call; pytest ends a test after 600 s
LATE = "no answer in time"
AFTER_A_FAILURE_S = 60.0  # how long the other ranks may take to hear of a failure


class Ranks:
    """Calls a function on all ranks at once. If one fails or does not answer, all processes are replaced, because the
    others may wait for it."""

    def __init__(
        self,
        context: ForkServerContext,
        world: int,
        folder: Path,
        timeout_s: float = 1800.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._context, self.world, self._folder, self._starts = context, world, folder, 0
        self._timeout_s = timeout_s  # of torch's process groups
        self.why = ""
        self.environment = environment or {}
        self._start()

    def _start(self) -> None:
        self._starts += 1
        ensure_fork_server()
        store = str(self._folder / f"store{self._starts}")
        self._processes, self._connections = [], []
        for rank in range(self.world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(theirs, rank, self.world, store, self._timeout_s, self.environment), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __call__(self, function: Callable[..., Any], timeout: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
        answers = self._ask(function, timeout, arguments, ends=False)
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self._end()
            self._start()
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def to_the_end(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Calls a function after which each process ends. Returns the results, or the tracebacks of errors. Then all
        processes are replaced."""
        answers = self._ask(function, TIMEOUT_S, arguments, ends=True)
        self._end()
        self._start()
        assert (False, LATE) not in answers, answers
        return [result for _, result in answers]

    def survivors(self, function: Callable[..., Any], dying: int, **arguments: Any) -> list[Any]:
        """The same of a function that raises on one rank, or during which its process ends: the results of the others.
        `why` is the error."""
        results = self.to_the_end(function, **arguments)
        self.why = results.pop(dying)
        return results

    def _ask(
        self, function: Callable[..., Any], timeout: float, arguments: dict[str, Any], ends: bool
    ) -> list[tuple[bool, Any]]:
        for connection in self._connections:
            connection.send((function, arguments, ends))
        answers: list[tuple[bool, Any]] = [(False, LATE)] * self.world
        waiting, until = set(range(self.world)), time.monotonic() + timeout
        while waiting and (left := until - time.monotonic()) > 0:
            for rank in [rank for rank in waiting if self._connections[rank].poll(min(left, 0.01))]:
                try:
                    answers[rank] = self._connections[rank].recv()
                except EOFError:
                    answers[rank] = False, "its process has ended"
                waiting.discard(rank)
                if not answers[rank][0]:
                    until = min(until, time.monotonic() + AFTER_A_FAILURE_S)
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(20)
        self._end()

    def _end(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            process.close()
            connection.close()


def pool(count: int, folders: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(STARTER, count, folders.mktemp("ranks"))
    yield started
    started.close()
