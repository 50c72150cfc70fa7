"""Comparisons: each a process (`optpipe_server.comparing`) with its solver's processes, few at a time, ended when
nobody waits any more."""

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
from optpipe.process import family, protocol
from optpipe_server.http.asked import hung_up
from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import Settings

log = structlog.get_logger("optpipe.server")

COMPARING = "optpipe_server.comparing"
AT_ONCE = 2
SLACK_S = 30.0  # for what is made without a search, and for processes to start and end


class Comparisons:
    """Those of one app, from its loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._running = settings, 0

    async def compared(self, request: Request, problem: Problem, methods: Sequence[str], time_limit_s: float) -> str:
        """The JSON of `optpipe compare --json`. Raises `ReplyError`: 422 for a method that is none, 503 where there is
        no answer."""
        if self._running >= AT_ONCE:
            raise ReplyError(503, f"{AT_ONCE} comparisons run already.", {"Retry-After": str(round(time_limit_s) + 1)})
        self._running += 1
        try:
            asked = protocol.Request(
                problem=problem,
                method=" ".join(methods),
                time_limit_s=time_limit_s,
                threads=self._settings.threads_per_solve,
                placements="all",
                memory_mib=self._settings.memory_mib,
            )
            return await _answer(request, asked, 2 * time_limit_s + SLACK_S)
        finally:
            self._running -= 1


async def _answer(request: Request, asked: protocol.Request, longest_s: float) -> str:
    mark = family.new_mark()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", COMPARING),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=family.environment(mark),
        start_new_session=True,
    )
    told, gone = asyncio.create_task(_told(process, asked)), asyncio.create_task(hung_up(request.receive))
    try:
        done, _ = await asyncio.wait({told, gone}, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
        if told in done:
            return _read(*told.result())
        if gone in done:
            raise ReplyError(408, "The client hung up.")
        raise ReplyError(503, f"The comparison was not done after {longest_s:g} s.", {"Retry-After": "60"})
    finally:
        for task in (told, gone):
            task.cancel()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(
                family.end, mark
            )  # first: `wait` waits for whoever has the process's output open, too
            await asyncio.wait({told, gone})
            await process.wait()


async def _told(process: asyncio.subprocess.Process, asked: protocol.Request) -> tuple[bytes, bytes]:
    """What the process wrote. Its input stays open meanwhile: it ends when that closes."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(ConnectionError):  # it ended before it had read, which its output tells
        process.stdin.write(asked.model_dump_json(exclude_none=True).encode() + b"\n")
        await process.stdin.drain()
    written, complaints = await asyncio.gather(process.stdout.read(), process.stderr.read())
    return written, complaints


def _read(written: bytes, complaints: bytes) -> str:
    text = written.decode(errors="replace").strip()
    if not text.endswith("}"):
        log.error("a comparison failed", why=complaints.decode(errors="replace").strip().rpartition("\n")[2])
        raise ReplyError(503, "The comparison's process ended before it was done.", {"Retry-After": "60"})
    if text.startswith('{"refused"'):
        raise ReplyError(422, f"compare: {json.loads(text)['refused']}")
    return text
