"""What a job has found: incumbents, what the training has adopted, timelines, rows for other programs, and the
job's log."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from sqlalchemy import Row

from optpipe.formats.convert import export_schedule
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.schedule import Schedule, certify, timed_ops
from optpipe.show.figure import figure
from optpipe.show.trace import trace
from optpipe_server.http import examples, schemas
from optpipe_server.http.bodies import AdoptionBody
from optpipe_server.http.context import LARGEST, Context, IfNoneMatch, Job, JobId, matches_etag
from optpipe_server.http.openapi import body, responses
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.views import (
    adoption_view,
    bound_view,
    etag,
    incumbent_text,
    job_url,
    listed_view,
    log_view,
    text,
    uses,
)
from optpipe_server.metrics import ADOPTIONS

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["schedules"])

MOST_LINES = 1000
MOST_DRAWN = 100_000  # ops in a trace or timeline
NO_SCHEDULE, NO_INCUMBENT = "The job has no schedule for its problem.", "The job has no such incumbent."

Seq = Annotated[int, Path(ge=1, le=LARGEST, description="The number of an incumbent.", examples=[1])]
WhichSeq = Annotated[
    int | None, Query(ge=1, le=LARGEST, description="The number of an incumbent; the best by default.")
]


def json_reply(content: str, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type="application/json")


@router.get("/incumbents", responses=responses(200, schemas.Incumbents, examples.INCUMBENTS, 404, 422))
async def list_incumbents(
    job_id: JobId, context: Context, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0
) -> Response:
    """The incumbents numbered above `after`, in short form."""
    found = await context.query_job(
        job_id, lambda job: context.service.jobs.incumbents(job.id, min(after, job.last_seq))
    )
    return json_reply(text({"incumbents": [listed_view(incumbent) for incumbent in found]}))


@router.get("/bounds", responses=responses(200, schemas.Bounds, examples.BOUNDS, 404))
async def list_bounds(job_id: JobId, context: Context) -> Response:
    """The lower bounds as they rose."""
    found = await context.query_job(job_id, lambda job: context.service.jobs.bounds(job.id))
    return json_reply(text({"bounds": [bound_view(bound) for bound in found]}))


@router.get(
    "/incumbents/best", responses=responses(200, schemas.WholeIncumbent, examples.WHOLE, 404, _304="Not changed")
)
async def best_incumbent(job_id: JobId, context: Context, if_none_match: IfNoneMatch = None) -> Response:
    """The best schedule for the job's current problem."""
    headers = {"Cache-Control": "no-cache"}
    return await context.query_job(job_id, lambda job: _whole(_found(context, job, None), if_none_match, headers))


@router.get(
    "/incumbents/{seq}", responses=responses(200, schemas.WholeIncumbent, examples.WHOLE, 404, 422, _304="Not changed")
)
async def show_incumbent(job_id: JobId, seq: Seq, context: Context, if_none_match: IfNoneMatch = None) -> Response:
    """One schedule. It never changes."""
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return await context.query_job(job_id, lambda job: _whole(_found(context, job, seq), if_none_match, headers))


def _found(context: Context, job: Job, seq: int | None) -> Row[Any]:
    """The incumbent of this number, or the best."""
    incumbent = (
        context.best(job)
        if seq is None
        else context.service.jobs.incumbent(job.id, seq)
        if seq <= job.last_seq
        else None
    )
    if incumbent is None:
        raise ReplyError(404, NO_SCHEDULE if seq is None else NO_INCUMBENT)
    return incumbent


def _whole(incumbent: Row[Any], known: str | None, headers: dict[str, str]) -> Response:
    headers = {"ETag": etag(incumbent.seq), **headers}
    return (
        Response(status_code=304, headers=headers)
        if matches_etag(known, incumbent.seq)
        else json_reply(incumbent_text(incumbent), headers)
    )


@router.put(
    "/adoptions/{seq}",
    openapi_extra=body(AdoptionBody, {"step": 120, "measured_iteration_ms": 9.2}),
    responses=responses(200, schemas.Adoption, examples.ADOPTION, 404, 422),
)
async def adopt(job_id: JobId, seq: Seq, request: Request, context: Context) -> Response:
    """Record that the training has swapped a schedule in: at which step, and the iteration time since.

    Recorded again, it replaces the former record.
    """
    adoption = await context.service.read(AdoptionBody, await request.body(), "adoption")
    adopted = await context.query_job(job_id, lambda job: _adopt(context, job, seq, adoption))
    ADOPTIONS.inc()
    return json_reply(text(adopted))


def _adopt(context: Context, job: Job, seq: int, adoption: AdoptionBody) -> dict[str, Any]:
    if seq > job.last_seq:
        raise ReplyError(404, NO_INCUMBENT)
    context.service.jobs.adopt(context.tenant, job.id, seq, adoption.step, adoption.measured_iteration_ms)
    return adoption_view(_found(context, job, seq))


@router.get("/adoptions", responses=responses(200, schemas.Adoptions, examples.ADOPTIONS, 404))
async def list_adoptions(job_id: JobId, context: Context) -> Response:
    """The schedules that the training has swapped in, with predicted and measured times."""
    found = await context.query_job(job_id, lambda job: context.service.jobs.incumbents(job.id))
    return json_reply(
        text({"adoptions": [adoption_view(incumbent) for incumbent in found if incumbent.step is not None]})
    )


@router.get("/log", responses=responses(200, schemas.Log, examples.LOG, 404, 422))
async def show_log(
    job_id: JobId,
    context: Context,
    after: Annotated[int, Query(ge=0, le=LARGEST, description="The number of a line.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = MOST_LINES,
) -> Response:
    """What happened to the job, and what its solvers reported."""
    found = await context.query_job(job_id, lambda job: context.service.jobs.log(job.id, after, limit + 1))
    lines = found[:limit]
    more = f"{job_url(job_id)}/log?after={lines[-1].number}&limit={limit}" if len(found) > limit else None
    return json_reply(text({"lines": log_view(lines), "next": more}))


@router.get("/trace", responses=responses(200, schemas.Trace, examples.TRACE, 404, 409, 422))
async def show_trace(job_id: JobId, context: Context, seq: WhichSeq = None) -> Response:
    """A schedule as a trace for Perfetto."""
    incumbent = await context.query_job(job_id, lambda job: _found(context, job, seq))
    return json_reply(await context.service.pictures.run(context.tenant, lambda: trace(_schedule(incumbent))))


@router.get("/timeline", responses=responses(200, schemas.Timeline, examples.TIMELINE, 404, 409, 422))
async def show_timeline(job_id: JobId, context: Context, seq: WhichSeq = None) -> Response:
    """When every op of a schedule runs, and the most memory that each device holds."""
    incumbent = await context.query_job(job_id, lambda job: _found(context, job, seq))
    return json_reply(await context.service.pictures.run(context.tenant, lambda: _timeline(incumbent)))


@router.get("/figure", responses=responses(200, schemas.Figure, examples.FIGURE, 404, 409, 422))
async def show_figure(
    job_id: JobId,
    context: Context,
    seq: WhichSeq = None,
    before: Annotated[int | None, Query(ge=1, le=LARGEST, description="An incumbent to show beside it.")] = None,
) -> Response:
    """What the interactive picture draws of a schedule, or of two on one time axis with what changed."""

    def both(job: Job) -> tuple[Row[Any], Row[Any] | None, float | None]:
        after = _found(context, job, seq)
        bound = job.lower_bound_ms if after.problem_version == job.problem_version else None
        return after, _found(context, job, before) if before is not None else None, bound

    found, other, bound_ms = await context.query_job(job_id, both)
    return json_reply(
        await context.service.pictures.run(
            context.tenant, lambda: text(figure(_schedule(found), _schedule(other) if other else None, bound_ms))
        )
    )


def _timeline(incumbent: Row[Any]) -> str:
    schedule = _schedule(incumbent)
    return text(
        {
            "seq": incumbent.seq,
            "problem_sha256": incumbent.problem_sha256,
            "makespan_ms": schedule.makespan_ms,
            "span_ms": schedule.span_ms,
            "bubble": schedule.timeline.bubble,
            "ops": timed_ops(schedule),
            "devices": uses(certify(schedule.problem, schedule)),
        }
    )


@router.get(
    "/export",
    response_class=Response,
    responses={
        **responses(200, None, None, 404, 409, 422),
        200: {
            "description": "OK",
            "content": {
                "text/csv": {"schema": {"type": "string"}, "example": examples.ROWS},
                "text/plain": {"schema": {"type": "string"}, "example": "--pipeline-model-parallel-size 2\n"},
                "application/json": {"schema": {"type": "object"}, "example": examples.NODES},
            },
        },
    },
)
async def export(
    job_id: JobId,
    context: Context,
    to: Annotated[
        Literal["torch-csv", "torch-comms", "torch-comms-waits", "megatron", "primus"],
        Query(description="The form to write."),
    ] = "torch-csv",
    seq: WhichSeq = None,
    without_offload: Annotated[bool, Query(description="Leave out offloads, drops and reloads.")] = False,
) -> Response:
    """A schedule as rows that PyTorch's pipelining reads, as Megatron's arguments, or as Primus' table (JSON)."""
    incumbent = await context.query_job(job_id, lambda job: _found(context, job, seq))
    rows = await context.service.pictures.run(
        context.tenant, lambda: export_schedule(_schedule(incumbent), to, without_offload)
    )
    return Response(rows, media_type={"megatron": "text/plain", "primus": "application/json"}.get(to, "text/csv"))


def _schedule(incumbent: Row[Any]) -> Schedule:
    """Raise `ReplyError` (409) for a schedule that is too large to be drawn here."""
    if (ops := incumbent.programs.count(" ")) > MOST_DRAWN:
        raise ReplyError(
            409,
            f"The schedule has about {ops} ops; expected up to {MOST_DRAWN} here; its own address has all of it.",
        )
    problem = Problem.from_json(incumbent.problem)
    return Programs.model_validate_json(incumbent.programs).schedule(problem, incumbent.method)
