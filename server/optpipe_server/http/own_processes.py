"""`OwnProcesses`: requests that compute for long, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from optpipe.process import process_tree
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.shares import Shares

log = structlog.get_logger("optpipe.server")

AT_ONCE = 2
OF_A_TENANT = 1
WHOLE = ("}", "</html>")  # how an answer ends


class OwnProcesses:
    """The long computations of one app; used from its event loop only."""

    def __init__(self) -> None:
        self._running, self._shares = 0, Shares(OF_A_TENANT, "comparison or diagnosis running")

    @contextlib.contextmanager
    def one(self, tenant: str, wait_s: float) -> Iterator[None]:
        """Hold one more; `wait_s` is what a client that comes too early is told. Raises `ReplyError`: 429 if the tenant
        has one, 503 if too many run."""
        if self._running >= AT_ONCE:
            wait = {"Retry-After": str(round(wait_s) + 1)}
            raise ReplyError(503, f"{AT_ONCE} comparisons or diagnoses run already.", wait)
        with self._shares.one(tenant):
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1


async def run_process(module: str, what: str, request: str, limit_s: float, folder: Path | None = None) -> str:
    """Return what `python -m module` answers to a request, one line of JSON; the process ends if this is cancelled.

    Parameters
    ----------
    what
        It is called in errors, such as compare.
    folder
        In which it runs; by default here.

    Raises
    ------
    ReplyError
        422 if it refused the request; 503 if it failed or took too long.
    """
    mark = process_tree.new_mark()
    with tempfile.TemporaryFile() as errors:
        process = await anyio.open_process(
            [sys.executable, "-m", module],
            cwd=folder,
            stderr=errors,
            env=process_tree.environment(mark),
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        try:
            with anyio.fail_after(limit_s):
                with contextlib.suppress(anyio.BrokenResourceError):  # it ended before it read, as its output tells
                    # The input stays open, because the process ends when it closes.
                    await process.stdin.send(request.encode() + b"\n")
                output = b"".join([chunk async for chunk in process.stdout])
        except TimeoutError:
            raise ReplyError(503, f"{what}: it was not done after {limit_s:g} s.", {"Retry-After": "60"}) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(process_tree.end, mark)
                await process.aclose()
        errors.seek(0)
        return _read(what, output, errors.read())


def _read(what: str, output: bytes, errors: bytes) -> str:
    text = output.decode(errors="replace").strip()
    if not text.endswith(WHOLE):
        log.error("a process failed", what=what, why=errors.decode(errors="replace").strip().rpartition("\n")[2])
        raise ReplyError(503, f"{what}: its process ended before it was done.", {"Retry-After": "60"})
    if text.startswith('{"refused"'):
        raise ReplyError(422, f"{what}: {json.loads(text)['refused']}")
    return text
