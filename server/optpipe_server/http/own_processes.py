"""`/v1/diagnose`: requests that compute for long, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import structlog
from fastapi import Query
from fastapi.responses import HTMLResponse, Response

from optpipe.errors import InputError
from optpipe.process import process_tree
from optpipe_server.http.auth import READ
from optpipe_server.http.context import Context, RequestContext
from optpipe_server.http.guarded_route import UPLOADED, UploadRequest, UploadRoute, guarded_router
from optpipe_server.http.replies import ReplyError, json_reply
from optpipe_server.own_process import UPLOAD, DiagnoseOptions, DiagnoseRequest

log = structlog.get_logger("optpipe.server")

uploads = guarded_router("/v1", "tools", UploadRoute)

MODULE = "optpipe_server.own_process"
LONGEST_DIAGNOSIS_S = 240.0  # for a trace of the largest size, packed
WHOLE = ("}", "</html>")  # how an answer ends
BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {UPLOADED: {"schema": {"type": "string", "format": "binary"}}}}
}


@uploads.post(
    "/diagnose",
    dependencies=[READ],
    response_model=dict[str, Any],
    responses={200: {"content": {"text/html": {}}}},
    openapi_extra=BODY,
)
async def diagnose(asked: Annotated[DiagnoseOptions, Query()], context: Context) -> Response:
    """Where the time of the steps in a trace goes, and what to change. The body is a trace, or a tar archive of more
    than one; each may be packed by gzip.

    The reply is what `optpipe diagnose --json` prints; with `to=html` a page, with `to=figure` the document that the
    page draws. It ends if the client disconnects.
    """
    settings = context.service.settings
    request = DiagnoseRequest(**asked.model_dump(), threads=settings.threads_per_solve, memory_mib=settings.memory_mib)
    assert isinstance(context.request, UploadRequest)
    with context.service.own_processes.one(60.0), tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / UPLOAD).open("wb") as file:
            async for chunk in context.request.chunks():
                file.write(chunk)
            if not file.tell():
                raise InputError("body: it is missing: a trace is expected")
        text = await _answer(context, "diagnose", request.model_dump_json(), LONGEST_DIAGNOSIS_S, folder)
        return HTMLResponse(text) if asked.to == "html" else json_reply(text)


async def _answer(context: RequestContext, what: str, request: str, limit_s: float, folder: str | None = None) -> str:
    """What a process answers to this request, unless the client disconnects or it refuses (`ReplyError`)."""
    async with context.cancelled_on_disconnect():
        text = await run_process(what, request, limit_s, folder)
        if text.startswith('{"refused"'):
            raise ReplyError(422, f"{what}: {json.loads(text)['refused']}")
        return text
    raise ReplyError(408, "The client disconnected.")


async def run_process(what: str, request: str, limit_s: float, folder: str | None = None) -> str:
    """Return what `python -m MODULE what` writes, run in the folder; it ends if this is cancelled. Raises `ReplyError`
    (503) if it fails or takes too long."""
    with tempfile.TemporaryFile() as errors:
        try:
            with anyio.fail_after(limit_s):
                async with _started(what, folder, errors) as process:
                    assert process.stdin
                    assert process.stdout
                    with contextlib.suppress(anyio.BrokenResourceError):  # it ended before it read, as its output tells
                        # The input stays open, because the process ends when it closes.
                        await process.stdin.send(request.encode() + b"\n")
                    output = b"".join([chunk async for chunk in process.stdout])
        except TimeoutError:
            raise ReplyError(503, f"{what}: it was not done after {limit_s:g} s.", retry_s=60) from None
        text = output.decode(errors="replace").strip()
        if not text.endswith(WHOLE):
            errors.seek(0)
            why = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            log.error("a process failed", what=what, why=why)
            raise ReplyError(503, f"{what}: its process ended before it was done.", retry_s=60)
        return text


@contextlib.asynccontextmanager
async def _started(what: str, folder: str | None, errors: Any) -> AsyncIterator[anyio.abc.Process]:
    """The process; none of what it has started is left afterwards."""
    mark = process_tree.new_mark()
    process = await anyio.open_process(
        [sys.executable, "-m", MODULE, what],
        cwd=folder,
        stderr=errors,
        env=process_tree.environment(mark),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process_tree.end, mark)
            await process.aclose()
