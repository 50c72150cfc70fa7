"""The routes under /v1."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import Row

from optpipe_server.events import stream
from optpipe_server.http.bodies import read_body, read_submission
from optpipe_server.http.replies import ReplyError
from optpipe_server.service import Service
from optpipe_server.store import MOST_LISTED
from optpipe_server.views import incumbent_view, job_url, job_view, whole_incumbent_view

router = APIRouter(prefix="/v1")

LARGEST = 2**53  # of numbers that the database is asked for


def service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Ours = Annotated[Service, Depends(service)]


def known_job(job_id: str, ours: Ours) -> Row[Any]:
    """The job named in the path."""
    job = ours.store.job(job_id)
    if job is None:
        raise ReplyError(404, "There is no such job.")
    return job


Job = Annotated[Row[Any], Depends(known_job)]


@router.post("/jobs", status_code=201)
async def submit(request: Request, ours: Ours) -> JSONResponse:
    """Takes {problem, method, time_limit_s, objective, warm_start}, only `problem` is required. The reply has the first schedule."""
    body = await read_body(request)
    job_id = await ours.submit(await run_in_threadpool(read_submission, body))
    return JSONResponse(await run_in_threadpool(ours.view, job_id), 201, {"Location": job_url(job_id)})


@router.get("/jobs")
def list_jobs(ours: Ours) -> JSONResponse:
    """The newest jobs, each without its schedules."""
    return JSONResponse({"jobs": [job_view(job, None) for job in ours.store.jobs()], "at_most": MOST_LISTED})


@router.get("/jobs/{job_id}")
def show_job(job: Job, ours: Ours) -> JSONResponse:
    """A job with its best schedule."""
    return JSONResponse(ours.view(job.id))


@router.post("/jobs/{job_id}/cancel", status_code=202)
def cancel(job: Job, ours: Ours) -> JSONResponse:
    """Ends a job with the best it has; says nothing new of one that is over."""
    ours.solves.cancel(job.id)
    return JSONResponse(ours.view(job.id), 202)


@router.get("/jobs/{job_id}/incumbents")
def list_incumbents(job: Job, ours: Ours, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0) -> JSONResponse:
    """The incumbents numbered above `after`, in short."""
    return JSONResponse({"incumbents": [incumbent_view(incumbent) for incumbent in ours.store.incumbents(job.id, after)]})


@router.get("/jobs/{job_id}/incumbents/best")
def best_incumbent(job: Job, ours: Ours) -> JSONResponse:
    return _whole(job, ours.store.incumbent(job.id), "The job has no schedule.")


@router.get("/jobs/{job_id}/incumbents/{seq}")
def show_incumbent(job: Job, ours: Ours, seq: Annotated[int, Path(ge=1, le=LARGEST)]) -> JSONResponse:
    return _whole(job, ours.store.incumbent(job.id, seq), "The job has no such incumbent.")


def _whole(job: Row[Any], incumbent: Row[Any] | None, missing: str) -> JSONResponse:
    if incumbent is None:
        raise ReplyError(404, missing)
    return JSONResponse(whole_incumbent_view(job, incumbent))


@router.get("/jobs/{job_id}/events")
def follow(job: Job, ours: Ours, last_event_id: Annotated[str | None, Header()] = None) -> StreamingResponse:
    """Server-sent events: every incumbent after Last-Event-ID, then those to come, then `end`."""
    if last_event_id and not re.fullmatch(r"[0-9]{1,15}", last_event_id):
        raise ReplyError(400, "Last-Event-ID must be the number of an incumbent.")
    events = stream(ours.store, ours.changes, job.id, int(last_event_id or 0), ours.settings.ping_s)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
