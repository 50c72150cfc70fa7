"""What a job has found: incumbents, what the training has adopted, pictures, rows for other programs, and the job's
log."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, Response
from sqlalchemy import Row

from optpipe_server.http import schemas
from optpipe_server.http.auth import READ, SUBMIT
from optpipe_server.http.context import LARGEST, Context, Job
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.schemas import AdoptionBody, incumbent_document, job_url
from optpipe_server.metrics import ADOPTIONS
from optpipe_server.pool.schedules import Stored, drawn, exported, traced

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["schedules"])

MOST_LINES = 1000
MOST_DRAWN = 100_000  # ops in a trace or picture

Seq = Annotated[int, Path(ge=1, le=LARGEST, description="The number of an incumbent.", examples=[1])]
WhichSeq = Annotated[
    int | None, Query(ge=1, le=LARGEST, description="The number of an incumbent; the best by default.")
]


@router.get("/incumbents", dependencies=[READ])
def list_incumbents(
    job: Job, context: Context, after: Annotated[int, Query(ge=0, le=LARGEST)] = 0
) -> schemas.Incumbents:
    """The incumbents numbered above `after`, in short form."""
    rows = context.service.jobs.incumbents(job.id, min(after, job.last_seq))
    return schemas.Incumbents(incumbents=[schemas.ListedIncumbent.from_row(row) for row in rows])


@router.get("/bounds", dependencies=[READ])
def list_bounds(job: Job, context: Context) -> schemas.Bounds:
    """The lower bounds as they rose."""
    return schemas.Bounds(bounds=[schemas.KnownBound.from_row(bound) for bound in context.service.jobs.bounds(job.id)])


@router.get("/incumbents/best", dependencies=[READ], response_model=schemas.WholeIncumbent)
def best_incumbent(job: Job, context: Context) -> Response:
    """The best schedule for the job's current problem."""
    return JSONResponse(incumbent_document(context.incumbent(job, None)))


@router.get("/incumbents/{seq}", dependencies=[READ], response_model=schemas.WholeIncumbent)
def show_incumbent(job: Job, seq: Seq, context: Context) -> Response:
    """One schedule. It never changes."""
    lasting = {"Cache-Control": "private, max-age=31536000, immutable"}
    return JSONResponse(incumbent_document(context.incumbent(job, seq)), headers=lasting)


@router.put("/adoptions/{seq}", dependencies=[SUBMIT])
def adopt(job: Job, seq: Seq, adoption: AdoptionBody, context: Context) -> schemas.Adoption:
    """Record that the training has swapped a schedule in: at which step, and the iteration time since.

    Recorded again, it replaces the former record.
    """
    context.service.jobs.adopt(job.id, seq, adoption.step, adoption.measured_iteration_ms)
    ADOPTIONS.inc()
    return schemas.Adoption.from_row(context.incumbent(context.job(job.id), seq))


@router.get("/adoptions", dependencies=[READ])
def list_adoptions(job: Job, context: Context) -> schemas.Adoptions:
    """The schedules that the training has swapped in, with predicted and measured times."""
    rows = context.service.jobs.incumbents(job.id)
    return schemas.Adoptions(adoptions=[schemas.Adoption.from_row(row) for row in rows if row.step is not None])


@router.get("/log", dependencies=[READ])
def show_log(
    job: Job,
    context: Context,
    after: Annotated[int, Query(ge=0, le=LARGEST, description="The number of a line.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = MOST_LINES,
) -> schemas.Log:
    """What happened to the job, and what its solvers reported."""
    rows = context.service.jobs.log(job.id, after, limit + 1)
    lines = [schemas.LogLine.from_row(row) for row in rows[:limit]]
    following = f"{job_url(job.id)}/log?after={lines[-1].number}&limit={limit}" if len(rows) > limit else None
    return schemas.Log(lines=lines, next=following)


def _drawable(context: Context, job: Row[Any], seq: int | None) -> Row[Any]:
    """Return an incumbent. Raises `MissingError`, and `ReplyError` (409) for one that is too large to be drawn here."""
    incumbent = context.incumbent(job, seq)
    if (ops := incumbent.programs.count(" ")) > MOST_DRAWN:
        raise ReplyError(
            409, f"The schedule has about {ops} ops; expected up to {MOST_DRAWN} here; its own address has all of it."
        )
    return incumbent


def _stored(incumbent: Row[Any]) -> Stored:
    return Stored(incumbent.problem, incumbent.programs, incumbent.method)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


@router.get("/trace", dependencies=[READ], response_model=dict[str, Any])
async def show_trace(job: Job, context: Context, seq: WhichSeq = None) -> Response:
    """A schedule as a trace for Perfetto."""
    shown = await context.service.query(partial(_drawable, context, job, seq))
    return _json(await context.service.pool.run_slow(traced, _stored(shown)))


@router.get("/figure", dependencies=[READ], response_model=dict[str, Any])
async def show_figure(
    job: Job,
    context: Context,
    seq: WhichSeq = None,
    before: Annotated[int | None, Query(ge=1, le=LARGEST, description="An incumbent to show beside it.")] = None,
) -> Response:
    """What the interactive picture (`optpipe.show.figure`) draws of a schedule, or of two with what changed."""
    query, pool = context.service.query, context.service.pool
    shown = await query(partial(_drawable, context, job, seq))
    other = await query(partial(_drawable, context, job, before)) if before is not None else None
    bound_ms = job.lower_bound_ms if shown.problem_version == job.problem_version else None
    return _json(await pool.run_slow(drawn, _stored(shown), _stored(other) if other else None, bound_ms))


@router.get(
    "/export",
    dependencies=[READ],
    response_class=Response,
    responses={200: {"content": {"text/csv": {}, "text/plain": {}, "application/json": {}}}},
)
async def export(
    job: Job,
    context: Context,
    to: Annotated[
        Literal["torch-csv", "torch-comms", "torch-comms-waits", "megatron", "primus"],
        Query(description="The form to write."),
    ] = "torch-csv",
    seq: WhichSeq = None,
    without_offload: Annotated[bool, Query(description="Leave out offloads, drops and reloads.")] = False,
    despite_memory: Annotated[bool, Query(description="Give it also if it needs more memory than there is.")] = False,
) -> Response:
    """A schedule as rows that PyTorch's pipelining reads, as Megatron's arguments, or as Primus' table (JSON).

    409 if it does not fit as the other program runs it, such as without its offloads.
    """
    shown = await context.service.query(partial(_drawable, context, job, seq))
    rows = await context.service.pool.run_slow(exported, _stored(shown), to, without_offload)
    if rows.misfits and not despite_memory:
        first, more = rows.misfits[0], len(rows.misfits) - 1
        others = f"; {more} more do not fit either" if more else ""
        without = " without offloads" if without_offload else ""
        raise ReplyError(409, f"It does not fit{without}: {first}{others}. despite_memory=true gives it all the same.")
    return Response(rows.text, media_type={"megatron": "text/plain", "primus": "application/json"}.get(to, "text/csv"))
