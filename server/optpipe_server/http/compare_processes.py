"""`CompareProcesses`: runs `/v1/compare` requests, each in a process of its own (`optpipe_server.compare_process`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

import anyio
import anyio.to_thread
import structlog
from fastapi import Request

from optpipe.comparison import searches
from optpipe.process import process_tree
from optpipe.process.protocol import CompareRequest
from optpipe_server.http.context import disconnected
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.shares import Shares
from optpipe_server.settings import Settings, within

log = structlog.get_logger("optpipe.server")

MODULE = "optpipe_server.compare_process"
AT_ONCE = 2
OF_A_TENANT = 1
EXTRA_S = 120.0  # for methods that need no search, and for processes to start and end on a busy machine


class CompareProcesses:
    """The compare processes of one app; used from its event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._running = settings, 0
        self._shares = Shares(OF_A_TENANT, "comparison running")

    async def run(self, tenant: str, request: Request, compare: CompareRequest) -> str:
        """Return the JSON of `optpipe compare --json`; the process ends if the client disconnects.

        A search gets no more threads and memory than the service has for one.

        Raises
        ------
        ReplyError
            422 if a method is unknown; 429 if the tenant has one running; 503 if too many run, or the process failed or
            took too long.
        """
        if self._running >= AT_ONCE:
            wait_s = round(compare.time_limit_s) + 1
            raise ReplyError(503, f"{AT_ONCE} comparisons run already.", {"Retry-After": str(wait_s)})
        with self._shares.one(tenant):
            self._running += 1
            try:
                limits = {
                    "threads": within(compare.threads, self._settings.threads_per_solve),
                    "memory_mib": within(compare.memory_mib, self._settings.memory_mib),
                }
                limit_s = len(searches(compare)) * compare.time_limit_s + EXTRA_S
                return await _run_process(request, compare.model_copy(update=limits), limit_s)
            finally:
                self._running -= 1


async def _run_process(request: Request, compare: CompareRequest, limit_s: float) -> str:
    mark = process_tree.new_mark()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=process_tree.environment(mark),
        start_new_session=True,
    )
    answered = asyncio.create_task(_communicate(process, compare))
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


async def _communicate(process: asyncio.subprocess.Process, compare: CompareRequest) -> tuple[bytes, bytes]:
    """Send the request; return stdout and stderr. The input stays open, because the process ends when it closes."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(ConnectionError):  # it ended before it read the request, as its output tells
        process.stdin.write(compare.model_dump_json(exclude_none=True).encode() + b"\n")
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
