"""The workbench: what published schedules and heuristics make of a problem, and what an edited schedule breaks, each as
a picture. Both are answered at once, so they are small; a search is a job."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.model.placement import Placement
from optpipe.model.records import Record
from optpipe.options import Methods, PlacementsOption
from optpipe.process.protocol import Bound, CompareRequest, Frame, Incumbent, Note, Refused
from optpipe.schedule import Schedule, check
from optpipe.show.figure import figure, side_by_side
from optpipe_server.http import examples, schemas
from optpipe_server.http.bodies import ProblemBody, parse
from optpipe_server.http.context import Context
from optpipe_server.http.openapi import body, responses
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.tools import MOST_WRONG, ScheduleBody
from optpipe_server.http.views import text
from optpipe_server.warm_process import WarmProcess

router = APIRouter(prefix="/v1", tags=["tools"])

MOST_FORWARDS = 512  # of a problem, stages times micro-batches
MOST_OPS = 20_000  # of an edited schedule
LONGEST_S = 20.0  # for all methods together; it is one to two seconds for the largest problem


class WorkbenchBody(ProblemBody):
    """`POST /v1/workbench`."""

    methods: Methods | None = None
    placements: PlacementsOption = "keep"


class WorkbenchRow(Record):
    """One method: why it has no schedule or does not fit, else its place among `figure.schedules`."""

    method: str
    fits: bool
    reason: str | None
    drawn: int | None
    placement: Placement | None  # which stages it is for, if not for those of the problem
    lower_bound_ms: float | None


class WorkbenchReply(Record):
    """The rows that fit, the shortest first, then the others."""

    rows: list[WorkbenchRow]
    figure: schemas.Figure | None  # null if no method has a schedule


class FigureReply(Record):
    """What is wrong with a schedule, and its picture, unless it has no ops, they wait for each other, or they are not
    those of its problem."""

    wrong: list[str]
    figure: schemas.Figure | None


def _all(generator: WarmProcess, asked: WorkbenchBody) -> str:
    """A `WorkbenchReply`. Raises `InputError` for an unknown method, `ReplyError` (503) if it takes too long."""
    frames: list[Frame] = []
    request = CompareRequest(problem=asked.problem, methods=asked.methods, placements=asked.placements)
    if not generator.ask(request, time.monotonic() + LONGEST_S, frames.append):
        raise ReplyError(503, f"The schedules were not made within {LONGEST_S:g} s.", {"Retry-After": "5"})
    if refused := next((frame.reason for frame in frames if isinstance(frame, Refused)), None):
        raise InputError(f"workbench: {refused}")
    bounds = {frame.method: frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)}
    found = [_row(frame, asked, bounds.get(frame.method)) for frame in frames if isinstance(frame, Incumbent)]
    found += [(_missing(frame.method, frame.text), None) for frame in frames if isinstance(frame, Note)]
    found.sort(key=lambda each: (each[1] is None, not each[0]["fits"], each[1].makespan_ms if each[1] else 0.0))
    drawn = [schedule for _, schedule in found if schedule is not None]
    rows = [row | {"drawn": i if schedule else None} for i, (row, schedule) in enumerate(found)]
    return text({"rows": rows, "figure": side_by_side(drawn) if drawn else None})


def _row(found: Incumbent, asked: WorkbenchBody, bound_ms: float | None) -> tuple[dict[str, Any], Schedule | None]:
    """What a method made, verified on the problem."""
    try:
        schedule = replace(found.schedule.schedule(asked.problem, found.method), method=found.method)
        wrong, misfits = schedule.compiled.complaints, schedule.compiled.certificate.complaints()
    except OptPipeError as error:
        return _missing(found.method, f"is no schedule: {error}"), None
    if wrong != misfits:
        return _missing(found.method, f"is no schedule: {wrong[0]}"), None
    placement = schedule.placement.model_dump(mode="json", exclude_none=True) if schedule.placement else None
    row = {"method": found.method, "fits": not wrong, "reason": wrong[0] if wrong else None, "placement": placement}
    return row | {"lower_bound_ms": bound_ms}, schedule


def _missing(method: str, reason: str) -> dict[str, Any]:
    return {"method": method, "fits": False, "reason": reason, "placement": None, "lower_bound_ms": None}


@router.post(
    "/workbench",
    openapi_extra=body(WorkbenchBody, {"problem": examples.PROBLEM, "methods": ["1f1b"]}),
    responses=responses(200, WorkbenchReply, examples.WORKBENCH, 422),
)
async def all_schedules(request: Request, context: Context) -> Response:
    """Every published schedule and heuristic of a small problem, or the methods given, to be drawn side by side."""
    sent, service = await request.body(), context.service
    async with context.cancelled_on_disconnect():
        asked = parse(WorkbenchBody, sent, "workbench")
        if (forwards := len(asked.problem.stages) * asked.problem.microbatches) > MOST_FORWARDS:
            raise InputError(
                f"workbench: problem has {forwards} forwards, stages times micro-batches: expected up to "
                f"{MOST_FORWARDS} here"
            )
        return _json(await service.sketches.run(context.tenant, lambda: _all(service.generator, asked)))
    raise ReplyError(408, "The client disconnected.")


@router.post(
    "/figure",
    openapi_extra=body(ScheduleBody, {"problem": examples.PROBLEM, "schedule": examples.SCHEDULE}),
    responses=responses(200, FigureReply, {"wrong": [], "figure": examples.FIGURE}, 422),
)
async def picture_of(request: Request, context: Context) -> Response:
    """What is wrong with a schedule, and what the interactive picture draws of it."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(context.tenant, lambda: text(_drawn(parse(ScheduleBody, sent, "figure"))))
    )


def _drawn(sent: ScheduleBody) -> dict[str, Any]:
    schedule = sent.read()
    if (ops := sum(len(program) for program in schedule.programs)) > MOST_OPS:
        raise InputError(f"figure: schedule has {ops} ops: expected up to {MOST_OPS} here")
    wrong = check(schedule.problem, schedule)[:MOST_WRONG]
    try:
        return {"wrong": wrong, "figure": figure(schedule) if ops else None}
    except ScheduleError:  # a deadlock, or other ops than the problem's, as `wrong` tells
        return {"wrong": wrong, "figure": None}


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
