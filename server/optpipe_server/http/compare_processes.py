"""`CompareProcesses`: runs `/v1/compare` requests, each in a process of its own (`optpipe_server.compare_process`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence

import anyio
import anyio.to_thread
import structlog
from fastapi import Request

from optpipe.model.problem import Problem
from optpipe.process import process_tree, protocol
from optpipe_server.http.context import disconnected
from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import Settings

log = structlog.get_logger("optpipe.server")

MODULE = "optpipe_server.compare_process"
AT_ONCE = 2
EXTRA_S = 30.0  # for methods that need no search, and for processes to start and end


class CompareProcesses:
    """The compare processes of one app; used from its event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._running = settings, 0

    async def run(self, request: Request, problem: Problem, methods: Sequence[str], time_limit_s: float) -> str:
        """Return the JSON of `optpipe compare --json`; the process ends if the client disconnects.

        Raises
        ------
        ReplyError
            422 if a method is unknown; 503 if too many comparisons run, or the process failed or took too long.
        """
        if self._running >= AT_ONCE:
            raise ReplyError(503, f"{AT_ONCE} comparisons run already.", {"Retry-After": str(round(time_limit_s) + 1)})
        self._running += 1
        try:
            solver_request = protocol.Request(
                problem=problem,
                method=" ".join(methods),
                time_limit_s=time_limit_s,
                threads=self._settings.threads_per_solve,
                placements="all",
                memory_mib=self._settings.memory_mib,
            )
            return await _run_process(request, solver_request, 2 * time_limit_s + EXTRA_S)
        finally:
            self._running -= 1


async def _run_process(request: Request, solver_request: protocol.Request, limit_s: float) -> str:
    mark = process_tree.new_mark()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=process_tree.environment(mark),
        start_new_session=True,
    )
    answered = asyncio.create_task(_communicate(process, solver_request))
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        done, _ = await asyncio.wait({answered, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if answered in done:
            return _read(*answered.result())
        if gone in done:
            raise ReplyError(408, "The client disconnected.")
        raise ReplyError(503, f"The comparison was not done after {limit_s:g} s.", {"Retry-After": "60"})
    finally:
        for task in (answered, gone):
            task.cancel()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            # Before `wait`, which also waits for every other process that has the output open.
            await anyio.to_thread.run_sync(process_tree.end, mark)
            await asyncio.wait({answered, gone})
            await process.wait()


async def _communicate(process: asyncio.subprocess.Process, solver_request: protocol.Request) -> tuple[bytes, bytes]:
    """Send the request; return stdout and stderr. The input stays open, because the process ends when it closes."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(ConnectionError):  # it ended before it read the request, as its output tells
        process.stdin.write(solver_request.model_dump_json(exclude_none=True).encode() + b"\n")
        await process.stdin.drain()
    output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
    return output, errors


def _read(output: bytes, errors: bytes) -> str:
    text = output.decode(errors="replace").strip()
    if not text.endswith("}"):
        log.error("a comparison failed", why=errors.decode(errors="replace").strip().rpartition("\n")[2])
        raise ReplyError(503, "The comparison's process ended before it was done.", {"Retry-After": "60"})
    if text.startswith('{"refused"'):
        raise ReplyError(422, f"compare: {json.loads(text)['refused']}")
    return text
