"""Jobs: submit, list, follow, extend, change, cancel and purge them."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response

from optpipe.model.records import Record
from optpipe_server.database.changes import StaleError
from optpipe_server.database.jobs import MOST_LISTED, is_over
from optpipe_server.database.tables import State
from optpipe_server.http import schemas
from optpipe_server.http.auth import READ, SUBMIT
from optpipe_server.http.context import LARGEST, Context, Job, JobId, matches_etag
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.schemas import ExtensionBody, ProblemBody, Submission, job_url

router = APIRouter(prefix="/v1", tags=["jobs"])

LONGEST_WAIT_S = 60
IdempotencyKey = Annotated[str | None, Header(pattern=r"^[!-~]{1,255}$")]
IfNoneMatch = Annotated[str | None, Header(description="ETags of the versions that the client has.")]
IfMatch = Annotated[str | None, Header(description="The job's ETag.")]
LastEventId = Annotated[str | None, Header(description="Number of an incumbent.")]


@router.post(
    "/jobs",
    dependencies=[SUBMIT],
    status_code=201,
    response_model=schemas.Job,
    responses={200: {"description": "Submitted before with the same Idempotency-Key", "model": schemas.Job}},
)
async def submit(
    submission: Submission, request: Request, context: Context, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit a job; the reply has its first schedule.

    The same Idempotency-Key and body mean the same job.
    """
    sent, service = await request.body(), context.service
    job_id, new = await service.submit(submission, context.key_name, idempotency_key, sent)
    status, headers = 201 if new else 200, {"Location": job_url(job_id)}
    return await service.query(partial(context.job_reply, job_id, status, headers))


@router.get("/jobs", dependencies=[READ])
def list_jobs(
    context: Context,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50,
    cursor: Annotated[int | None, Query(ge=1, le=LARGEST, description="From `next` of the former page.")] = None,
) -> schemas.JobList:
    """The newest jobs, without their schedules."""
    jobs = context.service.jobs.page(state, cursor, limit + 1)
    page = jobs[:limit]
    following = {"limit": limit, "cursor": page[-1].number} if len(jobs) > limit else {}
    if following and state:
        following["state"] = state
    return schemas.JobList(
        jobs=[schemas.JobSummary.from_row(job) for job in page],
        next=f"/v1/jobs?{urlencode(following)}" if following else None,
    )


class WorkerJobs(Record):
    worker: str
    jobs: list[schemas.JobId]


class Queue(Record):
    """Jobs that wait or run; of each key up to `most_open`. `solves` is the number of searches that this process runs
    at a time."""

    waiting: int
    running: int
    most_open: int
    solves: int
    workers: list[WorkerJobs]


@router.get("/queue", dependencies=[READ])
def show_queue(context: Context) -> Queue:
    """Jobs that wait or run, and the workers that have them."""
    running, waiting = context.service.jobs.queue()
    workers: dict[str, list[str]] = {}
    for job_id, worker in running:
        workers.setdefault(worker or "", []).append(job_id)
    settings = context.service.settings
    return Queue(
        waiting=waiting,
        running=len(running),
        most_open=settings.open_jobs,
        solves=settings.solves,
        workers=[WorkerJobs(worker=worker, jobs=ids) for worker, ids in sorted(workers.items())],
    )


@router.get(
    "/jobs/{job_id}",
    dependencies=[READ],
    response_model=schemas.Job,
    responses={304: {"description": "Not changed"}},
)
async def show_job(
    job_id: JobId,
    context: Context,
    if_none_match: IfNoneMatch = None,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False, description="Seconds.")] = 0.0,
) -> Response:
    """A job with its best schedule.

    With `wait` the reply comes when the job is over or, with If-None-Match, when it has changed.
    """
    service, any_change = context.service, if_none_match is not None
    if wait:
        job = await service.query(lambda: context.job(job_id))
        if matches_etag(if_none_match, job.version) if any_change else not is_over(job):
            async with service.job_updates.subscribe(job.id, job.version) as topic:
                await topic.until(lambda topic: topic.version > job.version if any_change else topic.over, wait)
    return await service.query(partial(context.job_reply, job_id, if_none_match=if_none_match))


@router.get(
    "/jobs/{job_id}/events",
    dependencies=[READ],
    response_class=Response,
    responses={
        200: {
            "description": "A stream of `incumbent` events that ends with `end`",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {"description": "The job is over, and Last-Event-ID is its last incumbent"},
    },
)
async def follow(job: Job, context: Context, last_event_id: LastEventId = None) -> Response:
    """Server-sent events: every incumbent after Last-Event-ID, then new ones, then `end`."""
    if last_event_id and not re.fullmatch(r"[0-9]{1,15}", last_event_id):
        raise ReplyError(400, "Last-Event-ID must be the number of an incumbent.")
    after = int(last_event_id or 0)
    if last_event_id and is_over(job) and job.last_seq <= after:
        return Response(status_code=204)
    service = context.service
    return service.job_updates.stream(job.id, job.version, after, service.settings.ping_s)


@router.post("/jobs/{job_id}/cancel", dependencies=[SUBMIT], status_code=202, response_model=schemas.Job)
def cancel(job: Job, context: Context) -> Response:
    """End a job with the best schedule that it has. A job that is over stays as it is."""
    context.service.jobs.cancel(job.id)
    context.service.worker.nudge()
    return context.job_reply(job.id, 202)


@router.put("/jobs/{job_id}/lease", dependencies=[SUBMIT], status_code=204)
def renew(job: Job, context: Context) -> Response:
    """Renew the lease of a job that was submitted with `lease_s`."""
    context.service.jobs.renew(job.id)
    return Response(status_code=204)


@router.patch("/jobs/{job_id}", dependencies=[SUBMIT], response_model=schemas.Job)
def extend(job: Job, extension: ExtensionBody, context: Context, if_match: IfMatch = None) -> Response:
    """Give an open job more time."""
    seen = re.fullmatch(r'"([0-9]{1,9})"', if_match.strip()) if if_match else None
    if seen is None:
        raise StaleError('If-Match: expected the ETag of the job as you know it, such as "3".')
    context.service.jobs.extend(job.id, extension.time_limit_s, int(seen[1]))
    return context.job_reply(job.id)


@router.post("/jobs/{job_id}/problem", dependencies=[SUBMIT], response_model=schemas.Job)
async def change_problem(job: Job, changed: ProblemBody, context: Context) -> Response:
    """Replace the job's problem by the same problem with other costs.

    The job goes on from its best schedule, and its whole time limit counts anew.
    """
    await context.service.change_problem(job.id, changed.problem)
    return await context.service.query(partial(context.job_reply, job.id))


@router.delete("/jobs/{job_id}", dependencies=[SUBMIT], status_code=204)
def purge(job: Job, context: Context) -> Response:
    """Delete the job with its schedules and its log; a running search ends."""
    context.service.jobs.purge(job.id)
    return Response(status_code=204)
