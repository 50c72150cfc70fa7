"""`CompareProcesses`: runs `/v1/compare` requests, each in a process of its own (`optpipe_server.compare_process`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile

import anyio
import anyio.to_thread
import structlog

from optpipe.comparison import searches
from optpipe.process import process_tree
from optpipe.process.protocol import CompareRequest
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

    async def run(self, tenant: str, compare: CompareRequest) -> str:
        """Return the JSON of `optpipe compare --json`; the process ends if this is cancelled.

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
        limits = {
            "threads": within(compare.threads, self._settings.threads_per_solve),
            "memory_mib": within(compare.memory_mib, self._settings.memory_mib),
        }
        limit_s = len(searches(compare)) * compare.time_limit_s + EXTRA_S
        with self._shares.one(tenant):
            self._running += 1
            try:
                return await _run_process(compare.model_copy(update=limits), limit_s)
            finally:
                self._running -= 1


async def _run_process(compare: CompareRequest, limit_s: float) -> str:
    mark = process_tree.new_mark()
    with tempfile.TemporaryFile() as errors:
        process = await anyio.open_process(
            [sys.executable, "-m", MODULE], stderr=errors, env=process_tree.environment(mark), start_new_session=True
        )
        assert process.stdin
        assert process.stdout
        try:
            with anyio.fail_after(limit_s):
                with contextlib.suppress(anyio.BrokenResourceError):  # it ended before it read, as its output tells
                    # The input stays open, because the process ends when it closes.
                    await process.stdin.send(compare.model_dump_json(exclude_none=True).encode() + b"\n")
                output = b"".join([chunk async for chunk in process.stdout])
        except TimeoutError:
            raise ReplyError(503, f"The comparison was not done after {limit_s:g} s.", {"Retry-After": "60"}) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(process_tree.end, mark)
                await process.aclose()
        errors.seek(0)
        return _read(output, errors.read())


def _read(output: bytes, errors: bytes) -> str:
    text = output.decode(errors="replace").strip()
    if not text.endswith("}"):
        log.error("a comparison failed", why=errors.decode(errors="replace").strip().rpartition("\n")[2])
        raise ReplyError(503, "The comparison's process ended before it was done.", {"Retry-After": "60"})
    if text.startswith('{"refused"'):
        raise ReplyError(422, f"compare: {json.loads(text)['refused']}")
    return text
