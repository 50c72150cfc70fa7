"""The workbench: what published schedules and heuristics make of a problem, and what an edited schedule breaks, each as
a picture. Both are answered at once, so they are small; a search is a job."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi.responses import Response

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.process.protocol import Bound, CompareRequest, Frame, Incumbent, Note, Refused
from optpipe.schedule import Schedule, check
from optpipe.show.figure import figure, side_by_side
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import ScheduleBody, WorkbenchBody, require_parts
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.tools import MOST_WRONG
from optpipe_server.warm_process import WarmProcess

router = guarded_router("/v1", "tools")

MOST_FORWARDS = 512  # of a problem, stages times micro-batches
MOST_PARTS = 2048  # of its activations
MOST_OPS = 20_000  # of an edited schedule
LONGEST_S = 20.0  # for all methods together; it is one to two seconds for the largest problem


@router.post("/workbench", dependencies=[READ], response_model=dict[str, Any])
async def all_schedules(sent: WorkbenchBody, context: Context) -> Response:
    """Every published schedule and heuristic of a small problem, or the methods given, to be drawn side by side."""
    if (forwards := len(sent.problem.stages) * sent.problem.microbatches) > MOST_FORWARDS:
        raise InputError(
            f"workbench: problem has {forwards} forwards, stages times micro-batches: expected up to "
            f"{MOST_FORWARDS} here"
        )
    require_parts(sent.problem, "workbench: problem", MOST_PARTS)
    async with context.cancelled_on_disconnect():
        return await context.computed(context.service.sketches, lambda: _drawn_all(context.service.generator, sent))
    raise ReplyError(408, "The client disconnected.")


class _Row(NamedTuple):
    """One method: what the reply says of it but `drawn`, and its schedule, if it has one."""

    shown: dict[str, Any]
    schedule: Schedule | None

    @property
    def order(self) -> tuple[bool, bool, float]:
        makespan_ms = self.schedule.makespan_ms if self.schedule else 0.0
        return self.schedule is None, not self.shown["fits"], makespan_ms


def _drawn_all(generator: WarmProcess, sent: WorkbenchBody) -> dict[str, Any]:
    """What the route replies. Raises `InputError` for an unknown method, `ReplyError` (503) if it takes too long."""
    frames: list[Frame] = []
    request = CompareRequest(problem=sent.problem, methods=sent.methods, placements=sent.placements)
    if not generator.ask(request, time.monotonic() + LONGEST_S, frames.append):
        raise ReplyError(503, f"The schedules were not made within {LONGEST_S:g} s.", retry_s=5)
    if refused := next((frame.reason for frame in frames if isinstance(frame, Refused)), None):
        raise InputError(f"workbench: {refused}")
    bounds = {frame.method: frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)}
    rows = [_verified(frame, sent, bounds.get(frame.method)) for frame in frames if isinstance(frame, Incumbent)]
    rows += [_without_schedule(frame.method, frame.text) for frame in frames if isinstance(frame, Note)]
    rows.sort(key=lambda row: row.order)
    drawn = [row.schedule for row in rows if row.schedule is not None]
    return {
        "rows": [row.shown | {"drawn": place if row.schedule else None} for place, row in enumerate(rows)],
        "figure": side_by_side(drawn) if drawn else None,
    }


def _verified(incumbent: Incumbent, sent: WorkbenchBody, bound_ms: float | None) -> _Row:
    """What a method made, verified on the problem."""
    try:
        schedule = replace(incumbent.schedule.schedule(sent.problem, incumbent.method), method=incumbent.method)
        wrong, misfits = schedule.compiled.complaints, schedule.compiled.certificate.complaints()
    except OptPipeError as error:
        return _without_schedule(incumbent.method, f"is no schedule: {error}")
    if wrong != misfits:
        return _without_schedule(incumbent.method, f"is no schedule: {wrong[0]}")
    shown = {
        "method": incumbent.method,
        "fits": not wrong,
        "reason": wrong[0] if wrong else None,
        "placement": schedule.placement.model_dump(mode="json", exclude_none=True) if schedule.placement else None,
        "lower_bound_ms": bound_ms,
    }
    return _Row(shown, schedule)


def _without_schedule(method: str, reason: str) -> _Row:
    shown = {"method": method, "fits": False, "reason": reason, "placement": None, "lower_bound_ms": None}
    return _Row(shown, None)


@router.post("/figure", dependencies=[READ], response_model=dict[str, Any])
async def judged_figure(sent: ScheduleBody, context: Context) -> Response:
    """What is wrong with a schedule, and what the interactive picture draws of it."""
    return await context.computed(context.service.checks, lambda: _drawn(sent.read()))


def _drawn(schedule: Schedule) -> dict[str, Any]:
    if (ops := sum(len(program) for program in schedule.programs)) > MOST_OPS:
        raise InputError(f"figure: schedule has {ops} ops: expected up to {MOST_OPS} here")
    wrong = check(schedule.problem, schedule)[:MOST_WRONG]
    try:
        return {"wrong": wrong, "figure": figure(schedule) if ops else None}
    except ScheduleError:  # a deadlock, or other ops than the problem's, as `wrong` tells
        return {"wrong": wrong, "figure": None}
