"""What a trace loses, why, and what to change: `optpipe diagnose` for what is uploaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import HTMLResponse, Response

from optpipe.errors import InputError
from optpipe_server.diagnose_process import UPLOAD, DiagnoseOptions, DiagnoseRequest
from optpipe_server.http import schemas
from optpipe_server.http.auth import READ
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import UPLOADED, UploadRequest, UploadRoute, guarded_router
from optpipe_server.http.own_processes import run_process
from optpipe_server.http.replies import ReplyError, json_reply

router = guarded_router("/v1", "tools", UploadRoute)

MODULE = "optpipe_server.diagnose_process"
LONGEST_S = 240.0  # for a trace of the largest size, packed
BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {UPLOADED: {"schema": {"type": "string", "format": "binary"}}}}
}
REPLIES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}}}


@router.post("/diagnose", dependencies=[READ], response_model=schemas.Diagnosis, responses=REPLIES, openapi_extra=BODY)
async def diagnose(asked: Annotated[DiagnoseOptions, Query()], context: Context) -> Response:
    """Where the time of the steps in a trace goes, and what to change. The body is a trace, or a tar archive of more
    than one; each may be packed by gzip.

    `to=html` answers with a page, `to=figure` with the document that the page draws. It ends if the client disconnects.
    """
    settings, service = context.service.settings, context.service
    request = DiagnoseRequest(**asked.model_dump(), threads=settings.threads_per_solve, memory_mib=settings.memory_mib)
    assert isinstance(context.request, UploadRequest)
    with service.own_processes.one(context.tenant, wait_s=60.0), tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / UPLOAD).open("wb") as file:
            async for chunk in context.request.chunks():
                file.write(chunk)
            if not file.tell():
                raise InputError("body: it is missing: a trace is expected")
        async with context.cancelled_on_disconnect():
            text = await run_process(MODULE, "diagnose", request.model_dump_json(), LONGEST_S, Path(folder))
            return HTMLResponse(text) if asked.to == "html" else json_reply(text)
    raise ReplyError(408, "The client disconnected.")
