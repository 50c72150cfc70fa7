"""The workbench: what published schedules and heuristics make of a problem, or what an edited schedule breaks, as a
picture. It is answered at once, so it is for small problems; a search is a job."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi.responses import Response

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.process.protocol import Bound, CompareRequest, Frame, Incumbent, Note, Refused
from optpipe.schedule import Schedule, check
from optpipe.show.figure import side_by_side
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import WorkbenchBody, require_parts
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.replies import ReplyError
from optpipe_server.warm_process import WarmProcess

router = guarded_router("/v1", "tools")

MOST_FORWARDS = 512  # of a problem, stages times micro-batches
MOST_PARTS = 2048  # of its activations
MOST_OPS = 20_000  # of an edited schedule
LONGEST_S = 20.0  # for all methods together; it is one to two seconds for the largest problem


@router.post("/workbench", dependencies=[READ], response_model=dict[str, Any])
async def workbench(sent: WorkbenchBody, context: Context) -> Response:
    """Every published schedule and heuristic of a small problem, or the methods given, to be drawn side by side; or the
    one schedule that is sent, with everything that is wrong with it."""
    if (schedule := sent.schedule) is not None:
        return await context.computed(context.service.checks, lambda: _reply([_edited(sent.read(schedule))]))
    if (forwards := len(sent.problem.stages) * sent.problem.microbatches) > MOST_FORWARDS:
        raise InputError(
            f"workbench: problem has {forwards} forwards, stages times micro-batches: expected up to "
            f"{MOST_FORWARDS} here"
        )
    require_parts(sent.problem, "workbench: problem", MOST_PARTS)
    async with context.cancelled_on_disconnect():
        return await context.computed(
            context.service.sketches, lambda: _reply(_generated(context.service.generator, sent))
        )
    raise ReplyError(408, "The client disconnected.")


class _Row(NamedTuple):
    """One method: what the reply says of it but `drawn`, and its schedule, if that can be drawn."""

    shown: dict[str, Any]
    schedule: Schedule | None

    @property
    def order(self) -> tuple[bool, bool, float]:
        makespan_ms = self.schedule.makespan_ms if self.schedule else 0.0
        return self.schedule is None, not self.shown["fits"], makespan_ms


def _reply(rows: list[_Row]) -> dict[str, Any]:
    """The shortest that fits first; `drawn` is a row's place in the figure."""
    rows.sort(key=lambda row: row.order)
    drawn = [row.schedule for row in rows if row.schedule is not None]
    return {
        "rows": [row.shown | {"drawn": place if row.schedule else None} for place, row in enumerate(rows)],
        "figure": side_by_side(drawn) if drawn else None,
    }


def _row(method: str, wrong: list[str], schedule: Schedule | None = None, bound_ms: float | None = None) -> _Row:
    placement = schedule.placement if schedule else None
    shown = {
        "method": method,
        "fits": not wrong,
        "wrong": wrong,
        "placement": placement.model_dump(mode="json", exclude_none=True) if placement else None,
        "lower_bound_ms": bound_ms,
    }
    return _Row(shown, schedule)


def _edited(schedule: Schedule) -> _Row:
    """A schedule that may be invalid; it is drawn if it can run."""
    if (ops := sum(len(program) for program in schedule.programs)) > MOST_OPS:
        raise InputError(f"workbench: schedule has {ops} ops: expected up to {MOST_OPS} here")
    wrong = check(schedule.problem, schedule)
    try:
        runs = ops > 0 and schedule.makespan_ms >= 0
    except ScheduleError:  # a deadlock, or other ops than the problem's, as `wrong` tells
        runs = False
    return _row(schedule.method, wrong, schedule if runs else None)


def _generated(generator: WarmProcess, sent: WorkbenchBody) -> list[_Row]:
    """A row for each method. Raises `InputError` for an unknown one, `ReplyError` (503) if it takes too long."""
    frames: list[Frame] = []
    request = CompareRequest(problem=sent.problem, methods=sent.methods, placements=sent.placements)
    if not generator.ask(request, time.monotonic() + LONGEST_S, frames.append):
        raise ReplyError(503, f"The schedules were not made within {LONGEST_S:g} s.", retry_s=5)
    if refused := next((frame.reason for frame in frames if isinstance(frame, Refused)), None):
        raise InputError(f"workbench: {refused}")
    bounds = {frame.method: frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)}
    rows = [_verified(frame, sent, bounds.get(frame.method)) for frame in frames if isinstance(frame, Incumbent)]
    return rows + [_row(frame.method, [frame.text]) for frame in frames if isinstance(frame, Note)]


def _verified(incumbent: Incumbent, sent: WorkbenchBody, bound_ms: float | None) -> _Row:
    """What a method made, verified on the problem."""
    try:
        schedule = replace(incumbent.schedule.schedule(sent.problem, incumbent.method), method=incumbent.method)
        wrong, misfits = schedule.compiled.complaints, schedule.compiled.certificate.complaints()
    except OptPipeError as error:
        return _row(incumbent.method, [f"is no schedule: {error}"])
    if wrong != misfits:
        return _row(incumbent.method, [f"is no schedule: {wrong[0]}"])
    return _row(incumbent.method, wrong, schedule, bound_ms)
