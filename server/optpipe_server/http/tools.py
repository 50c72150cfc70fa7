"""What needs no job: lookup in the cache, and the page's two tools, workbench and diagnosis."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from optpipe import solvers
from optpipe.errors import InputError
from optpipe.evaluate.objective import gap, length_ms
from optpipe.model.records import Record
from optpipe.process.protocol import CompareRequest
from optpipe.schedule import ScheduleFile
from optpipe_server.accepted import require_parts
from optpipe_server.http.auth import READ
from optpipe_server.http.context import Context
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.schemas import FromRow, LookupBody, WorkbenchBody
from optpipe_server.pool import schedules
from optpipe_server.pool.diagnosis import UPLOAD, DiagnoseOptions, diagnosed

router = APIRouter(prefix="/v1", tags=["tools"])

MOST_FORWARDS = 512  # of a problem for the workbench, stages times micro-batches
MOST_PARTS = 2048  # of its activations
UPLOADS = "/v1/diagnose"  # the route that reads longer bodies
LONGEST_UPLOAD = 2**26  # bytes of a trace
UPLOADED = "application/octet-stream"
LONGEST_DIAGNOSIS_S = 240.0  # for a trace of the largest size, packed
LOOK_S = 0.5  # between two looks whether the client is still there
TRACE: dict[str, Any] = {
    "requestBody": {"required": True, "content": {UPLOADED: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/workbench", dependencies=[READ], response_model=dict[str, Any])
async def workbench(sent: WorkbenchBody, context: Context) -> Response:
    """Every published schedule and heuristic of a small problem, or these methods, to be drawn side by side; or the
    one schedule that is sent, with everything that is wrong with it."""
    pool, problem = context.service.pool, sent.problem
    if sent.schedule is not None:
        text = await pool.run_slow(schedules.edited, problem.to_json(), sent.schedule.model_dump_json())
        return Response(text, media_type="application/json")
    if (forwards := len(problem.stages) * problem.microbatches) > MOST_FORWARDS:
        raise InputError(
            f"workbench: problem has {forwards} forwards, stages times micro-batches: expected up to "
            f"{MOST_FORWARDS} here"
        )
    require_parts(problem, "workbench: problem", MOST_PARTS)
    request = CompareRequest(problem=problem, methods=sent.methods, placements=sent.placements)
    text = await pool.run_slow(
        schedules.published, solvers.installed().COMPARE, request.model_dump_json(exclude_none=True)
    )
    return Response(text, media_type="application/json")


@router.post(
    "/diagnose",
    dependencies=[READ],
    response_model=dict[str, Any],
    responses={200: {"content": {"text/html": {}}}},
    openapi_extra=TRACE,
)
async def diagnose(asked: Annotated[DiagnoseOptions, Query()], request: Request, context: Context) -> Response:
    """Where the time of the steps in a trace goes, and what to change. The body is a trace, or a tar archive of more
    than one; each may be packed by gzip.

    The reply is what `optpipe diagnose --json` prints; with `to=html` a page, with `to=figure` the document that the
    page draws. It ends if the client disconnects.
    """
    if request.headers.get("content-type", "").partition(";")[0] != UPLOADED:
        raise ReplyError(415, f"Content-Type must be {UPLOADED}.")
    settings = context.service.settings
    with tempfile.TemporaryDirectory() as folder:
        upload = Path(folder) / UPLOAD
        with upload.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        if not upload.stat().st_size:
            raise InputError("body: it is missing: a trace is expected")
        (wanted := Path(folder) / "wanted").touch()
        task = asyncio.create_task(
            context.service.pool.run_longest(
                diagnosed,
                Path(folder),
                asked,
                settings.threads_each,
                settings.memory_mib,
                limit_s=LONGEST_DIAGNOSIS_S,
                wanted=wanted,
            )
        )
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    wanted.unlink(missing_ok=True)
            text = await task
        except InputError as error:
            raise InputError(f"diagnose: {error}") from None
        finally:
            task.cancel()
    return HTMLResponse(text) if asked.to == "html" else Response(text, media_type="application/json")


class CacheHit(FromRow):
    """A cached schedule, verified on this problem. `distance` is 0 if it was solved for this problem (`exact`); `terms`
    is what each feature adds to it. `gap` says by which share a schedule could be shorter at most; it and the bound are
    null unless it is `exact` and there is a bound."""

    exact: bool
    source: Literal["cache", "pack"]
    distance: float
    terms: dict[str, float]
    status: str
    lower_bound_ms: float | None
    gap: float | None
    makespan_ms: float
    span_ms: float
    schedule: ScheduleFile


class Lookup(Record):
    """`hit` is null if there is no similar problem."""

    hit: CacheHit | None


@router.post("/cache/lookup", dependencies=[READ], response_model=Lookup)
async def look_up(sent: LookupBody, context: Context) -> Response:
    """The cached schedule of this problem, or of the most similar one whose schedule is valid for it."""

    def reply() -> Response:
        try:
            hit = context.service.cache.open().lookup(sent.problem, sent.objective)
        except InputError as error:  # not the client's mistake
            raise ReplyError(503, f"The cache cannot be used: {error}", retry_s=60) from None
        if hit is None:
            return JSONResponse({"hit": None})
        schedule, bound_ms = hit.schedule, hit.lower_bound_ms
        shown = CacheHit.from_row(
            hit,
            gap=gap(length_ms(schedule, sent.objective), bound_ms),
            makespan_ms=schedule.makespan_ms,
            span_ms=schedule.span_ms,
            schedule=ScheduleFile.from_schedule(schedule, with_ops=False, status=hit.status, lower_bound_ms=bound_ms),
        )
        whole = shown.schedule.model_dump(mode="json", exclude_none=True)
        return JSONResponse({"hit": shown.model_dump(exclude={"schedule"}) | {"schedule": whole}})

    return await context.service.first_schedules.check(reply)
