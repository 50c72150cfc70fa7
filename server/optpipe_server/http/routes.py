"""Jobs: submit, list, follow, extend, change, cancel and purge them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response

from optpipe_server.database.job_queries import MOST_LISTED
from optpipe_server.database.jobs import ConflictError, StaleError
from optpipe_server.database.tables import State
from optpipe_server.http import examples, schemas
from optpipe_server.http.bodies import ExtensionBody, ProblemBody, Submission
from optpipe_server.http.context import Context, IfNoneMatch, Job, JobId, matches_etag
from optpipe_server.http.events import EventStream
from optpipe_server.http.openapi import body, responses
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.views import cursor, etag, from_cursor, job_url, job_view, over, text

router = APIRouter(prefix="/v1", tags=["jobs"])

LONGEST_WAIT_S = 60
LastEventId = Annotated[str | None, Header(description="Number of an incumbent.")]
IfMatch = Annotated[str | None, Header(description="The job's ETag.")]


@router.post(
    "/jobs",
    status_code=201,
    openapi_extra=body(Submission, examples.SUBMISSION),
    responses={
        **responses(201, schemas.Job, examples.JOB, 422, 429),
        200: responses(200, schemas.Job, examples.JOB)[200]
        | {"description": "Submitted before with the same Idempotency-Key"},
    },
)
async def submit(
    request: Request, context: Context, idempotency_key: Annotated[str | None, Header(pattern=r"^[!-~]{1,255}$")] = None
) -> Response:
    """Submit a job; the reply has its first schedule.

    The same Idempotency-Key and body mean the same job.
    """
    sent = await request.body()
    job_id, new = None, False
    if idempotency_key is not None:
        job_id = await context.service.submitted(context.tenant, idempotency_key, sent)
    if job_id is None:
        async with context.service.turns.one(context.tenant):
            submission = await context.service.read(Submission, sent, "job")
            job_id, new = await context.service.submit(context.tenant, submission, idempotency_key, sent)
    return await context.job_reply(job_id, 201 if new else 200, {"Location": job_url(job_id)})


@router.get("/jobs", responses=responses(200, schemas.JobList, examples.JOBS, 422))
async def list_jobs(
    context: Context,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50,
    cursor: Annotated[str | None, Query(max_length=40, description="From `next` of the former page.")] = None,
) -> Response:
    """The newest jobs, without their schedules."""
    try:
        before = from_cursor(cursor) if cursor is not None else None
    except ValueError:
        raise ReplyError(422, "cursor: expected one from `next` of a list of jobs.") from None
    return await context.service.query(lambda: _page(context, state, limit, before))


def _page(context: Context, state: State | None, limit: int, before: int | None) -> Response:
    found = context.service.jobs.page(context.tenant, state, before, limit + 1)
    page = found[:limit]
    more = (
        {"limit": limit, "cursor": cursor(page[-1].number), **({"state": state} if state else {})}
        if len(found) > limit
        else None
    )
    listed = {"jobs": [job_view(job) for job in page], "next": f"/v1/jobs?{urlencode(more)}" if more else None}
    return Response(text(listed), media_type="application/json")


@router.get("/queue", responses=responses(200, schemas.Queue, examples.QUEUE))
async def show_queue(context: Context) -> Response:
    """The tenant's jobs that wait or run, and the workers that have them."""
    return await context.service.query(lambda: _queue(context))


def _queue(context: Context) -> Response:
    running, waiting, ahead = context.service.jobs.queue(context.tenant)
    workers: dict[str, list[str]] = {}
    for job_id, worker in running:
        workers.setdefault(worker or "", []).append(job_id)
    shown = {
        "waiting": waiting,
        "ahead": ahead,
        "most_waiting": context.service.settings.queue,
        "running": len(running),
        "solves": context.service.settings.solves,
        "workers": [{"worker": worker, "jobs": ids} for worker, ids in sorted(workers.items())],
    }
    return Response(text(shown), media_type="application/json")


@router.get("/jobs/{job_id}", responses=responses(200, schemas.Job, examples.JOB, 404, 422, _304="Not changed"))
async def show_job(
    job_id: JobId,
    context: Context,
    if_none_match: IfNoneMatch = None,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False, description="Seconds.")] = 0.0,
) -> Response:
    """A job with its best schedule.

    With `wait` the reply comes when the job is over or, with If-None-Match, when it has changed.
    """
    if wait:
        job = await context.query_job(job_id, lambda job: job)
        if not over(job) if if_none_match is None else matches_etag(if_none_match, job.version):
            async with (
                context.service.job_updates.subscribe(context.tenant, job.id, job.version) as topic,
                context.cancelled_on_disconnect(),
            ):
                await topic.until(
                    lambda topic: topic.over if if_none_match is None else topic.version > job.version, wait
                )
    if if_none_match is not None:
        job = await context.query_job(job_id, lambda job: job)
        if matches_etag(if_none_match, job.version):
            return Response(status_code=304, headers={"ETag": etag(job.version)})
    return await context.job_reply(job_id)


@router.get(
    "/jobs/{job_id}/events",
    status_code=200,
    response_class=EventStream,
    responses={
        **responses(200, None, None, 404, _204="The job is over, and Last-Event-ID is its last incumbent"),
        200: {
            "description": "A stream that ends with `end`",
            "content": {"text/event-stream": {"example": examples.EVENTS}},
        },
    },
)
async def follow(job_id: JobId, context: Context, last_event_id: LastEventId = None) -> Response:
    """Server-sent events: every incumbent after Last-Event-ID, then new ones, then `end`."""
    if last_event_id and not re.fullmatch(r"[0-9]{1,15}", last_event_id):
        raise ReplyError(400, "Last-Event-ID must be the number of an incumbent.")
    job, after = await context.query_job(job_id, lambda job: job), int(last_event_id or 0)
    if last_event_id and over(job) and job.last_seq <= after:
        return Response(status_code=204)
    return EventStream(
        context.service.job_updates, context.tenant, job.id, job.version, after, context.service.settings.ping_s
    )


@router.post("/jobs/{job_id}/cancel", status_code=202, responses=responses(202, schemas.Job, examples.JOB, 404))
async def cancel(job_id: JobId, context: Context) -> Response:
    """End a job with the best schedule that it has. A job that is over stays as it is."""
    await context.query_job(job_id, lambda job: context.service.jobs.cancel(context.tenant, job.id))
    context.service.supervisor.nudge()
    return await context.job_reply(job_id, 202)


@router.patch(
    "/jobs/{job_id}",
    openapi_extra=body(ExtensionBody, {"time_limit_s": 600.0}),
    responses=responses(200, schemas.Job, examples.JOB, 404, 409, 412, 422),
)
async def extend(job_id: JobId, request: Request, context: Context, if_match: IfMatch = None) -> Response:
    """Give an open job more time."""
    extension = await context.service.read(ExtensionBody, await request.body(), "job")
    await context.query_job(job_id, lambda job: _extend(context, job, extension.time_limit_s, if_match))
    return await context.job_reply(job_id)


def _extend(context: Context, job: Job, time_limit_s: float, if_match: str | None) -> None:
    seen = re.fullmatch(r'"([0-9]{1,9})"', if_match.strip()) if if_match else None
    if seen is None:
        raise ReplyError(412, 'If-Match: expected the ETag of the job as you know it, such as "3".')
    try:
        context.service.jobs.extend(context.tenant, job.id, time_limit_s, int(seen[1]))
    except StaleError:
        raise ReplyError(412, "If-Match: the job has changed; its ETag is another one.") from None
    except ConflictError as error:
        raise ReplyError(409, str(error)) from None


@router.post(
    "/jobs/{job_id}/problem",
    openapi_extra=body(ProblemBody, {"problem": examples.PROBLEM}),
    responses=responses(200, schemas.Job, examples.JOB, 404, 409, 422, 429),
)
async def change_problem(job_id: JobId, request: Request, context: Context) -> Response:
    """Replace the job's problem by the same problem with other costs.

    The job goes on from its best schedule, and its whole time limit counts anew.
    """
    sent = await request.body()
    try:
        async with context.service.turns.one(context.tenant):
            changed = await context.service.read(ProblemBody, sent, "job")
            await context.query_job(job_id, lambda job: None)
            await context.service.change_problem(context.tenant, job_id, changed.problem)
    except LookupError:
        raise ReplyError(404, "There is no such job.") from None
    return await context.job_reply(job_id)


@router.delete("/jobs/{job_id}", status_code=204, response_class=Response, responses=responses(204, None, None, 404))
async def purge(job_id: JobId, context: Context) -> Response:
    """Delete the job with its schedules and its log; a running search ends."""
    await context.query_job(job_id, lambda job: context.service.jobs.purge(context.tenant, job.id))
    return Response(status_code=204)
