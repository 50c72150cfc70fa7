"""Answers without a job: is a schedule valid, how long does it take, which method is best, is a schedule known."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Items, Record
from optpipe.schedule import Schedule, ScheduleFile, TimedOp, certify, check, timed_ops
from optpipe_cache import Hit
from optpipe_server.first import LARGE, size
from optpipe_server.http import examples, shapes
from optpipe_server.http.asked import Ask
from optpipe_server.http.bodies import MOST_STAGES, Posed, parse
from optpipe_server.http.comparisons import Comparisons
from optpipe_server.http.docs import body, replies
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.views import text, uses

router = APIRouter(prefix="/v1", tags=["tools"])

MOST_WRONG = 50  # sentences
MOST_OPS = 10_000  # of a timeline, the first ones
LONGEST_COMPARED_S = 60.0


class Given(Posed):
    """A problem and a schedule document, whatever problem that was made for."""

    schedule: ScheduleFile

    def read(self) -> Schedule:
        """The schedule, for the problem or the placement of it that the schedule has. Raises `InputError`."""
        file = self.schedule
        placed = file.placement.apply(self.problem) if file.placement else self.problem
        if len(placed.stages) > MOST_STAGES:
            raise InputError(
                f"schedule.placement makes {len(placed.stages)} stages: the service takes up to {MOST_STAGES}"
            )
        return Schedule.parse(
            placed, (device.program for device in file.devices), file.links, file.method, file.placement
        )


class Compared(Posed):
    """`POST /v1/compare`."""

    methods: (
        Annotated[Items[Annotated[str, Field(pattern=r"^[a-z0-9:=,-]{1,100}$")]], Field(min_length=1, max_length=100)]
        | None
    ) = None
    time_limit_s: Annotated[float, Field(strict=True, gt=0, le=LONGEST_COMPARED_S, allow_inf_nan=False)] = (
        10.0  # of each search
    )


class Wanted(Posed):
    """`POST /v1/cache/lookup`."""

    objective: Objective = "makespan"


class Checked(Record):
    """Whether a schedule runs and fits; `wrong` is one sentence for each fault, `devices` is null where no memory can
    be counted."""

    valid: bool
    wrong: list[str]
    devices: list[shapes.DeviceUse] | None


class Simulated(Record):
    """A schedule by nominal times, whether its memory suffices or not; `ops` are the first ones by start, `ops_total`
    counts all."""

    makespan_ms: float
    span_ms: float
    bubble: float  # the share of the makespan in which devices do not compute
    ops: list[TimedOp]
    ops_total: int
    devices: list[shapes.DeviceUse]


class Row(Record):
    """One method: its schedule's figures, and why it does not fit or is not for the problem."""

    method: str
    placements: str
    found_by: str | None
    fits: bool
    makespan_ms: float | None
    span_ms: float | None
    bubble: float | None
    lower_bound_ms: float | None
    gap: float | None
    placement: dict[str, Any] | None
    peak_bytes: list[int] | None
    host_peak_bytes: list[int] | None
    reason: str | None


class Table(Record):
    """Those that fit, the shortest first, then the others; what `optpipe compare --json` prints."""

    problem: str
    k: list[float | None]
    rows: list[Row]


class Known(Record):
    """A schedule from the cache, checked on this problem; `distance` is 0 where it was solved for it (`exact`)."""

    exact: bool
    distance: float
    status: str
    lower_bound_ms: float | None
    makespan_ms: float
    span_ms: float
    schedule: ScheduleFile


class Found(Record):
    """Null where nothing near is known."""

    hit: Known | None


def _comparisons(request: Request) -> Comparisons:
    found: Comparisons = request.app.state.comparisons
    return found


_BOTH = {"problem": examples.PROBLEM, "schedule": examples.SCHEDULE}
_USES = examples.TIMELINE["devices"]
_CHECKED = {"valid": True, "wrong": [], "devices": _USES}
_SIMULATED = {
    "makespan_ms": 9.0,
    "span_ms": 9.0,
    "bubble": 0.33,
    "ops": examples.TIMELINE["ops"],
    "ops_total": 8,
    "devices": _USES,
}
_ROW = {
    "method": "1f1b",
    "placements": "all",
    "found_by": "1f1b",
    "fits": True,
    "makespan_ms": 9.0,
    "span_ms": 9.0,
    "bubble": 0.33,
    "lower_bound_ms": 8.0,
    "gap": 0.11,
    "placement": None,
    "peak_bytes": [2000, 1000],
    "host_peak_bytes": [0, 0],
    "reason": None,
}
_KNOWN = {
    "exact": False,
    "distance": 0.05,
    "status": "feasible",
    "lower_bound_ms": None,
    "makespan_ms": 9.0,
    "span_ms": 9.0,
}


@router.post("/check", openapi_extra=body(Given, _BOTH), responses=replies(200, Checked, _CHECKED, 422))
async def check_schedule(request: Request, asked: Ask) -> Response:
    """Whether a schedule is one of the problem: its ops in an order that runs, and no device with more memory than it
    has."""
    sent = await request.body()
    return _json(await asked.service.checks.compute(lambda: text(_checked(parse(Given, sent, "check")))))


def _checked(given: Given) -> dict[str, Any]:
    schedule = given.read()
    wrong = check(schedule.problem, schedule)
    try:
        devices = uses(certify(schedule.problem, schedule))
    except ScheduleError:  # of other stages or micro-batches, as `wrong` says
        devices = None
    return {"valid": not wrong, "wrong": wrong[:MOST_WRONG], "devices": devices}


@router.post("/simulate", openapi_extra=body(Given, _BOTH), responses=replies(200, Simulated, _SIMULATED, 422))
async def simulate_schedule(request: Request, asked: Ask) -> Response:
    """When each op runs, by nominal times, and what each device holds at most."""
    sent = await request.body()
    return _json(await asked.service.checks.compute(lambda: text(_simulated(parse(Given, sent, "simulate")))))


def _simulated(given: Given) -> dict[str, Any]:
    try:
        schedule = given.read()
        ops = timed_ops(schedule)
        return {
            "makespan_ms": schedule.makespan_ms,
            "span_ms": schedule.span_ms,
            "bubble": schedule.timeline.bubble,
            "ops": ops[:MOST_OPS],
            "ops_total": len(ops),
            "devices": uses(certify(schedule.problem, schedule)),
        }
    except ScheduleError as error:
        raise ReplyError(422, f"simulate: schedule: {str(error).partition(chr(10))[0]}") from None


@router.post(
    "/compare",
    openapi_extra=body(Compared, {"problem": examples.PROBLEM, "time_limit_s": 5.0}),
    responses=replies(200, Table, {"problem": "", "k": [0.5], "rows": [_ROW]}, 422),
)
async def compare_methods(
    request: Request, asked: Ask, comparisons: Annotated[Comparisons, Depends(_comparisons)]
) -> Response:
    """Every published schedule, every heuristic and the solver's answer (or the methods named) on one problem. It takes
    up to twice the time limit and some seconds, and ends when the client hangs up."""
    sent = await request.body()
    wanted = await asked.service.checks.compute(lambda: _comparable(parse(Compared, sent, "compare")))
    return _json(await comparisons.compared(request, wanted.problem, wanted.methods or (), wanted.time_limit_s))


def _comparable(wanted: Compared) -> Compared:
    if (parts := size(wanted.problem)) > LARGE:
        raise InputError(
            f"compare: problem has {parts} parts of activations, over stages and micro-batches: up to {LARGE} are "
            "compared here"
        )
    return wanted


@router.post(
    "/cache/lookup",
    openapi_extra=body(Wanted, {"problem": examples.PROBLEM, "objective": "makespan"}),
    responses=replies(200, Found, {"hit": {**_KNOWN, "schedule": examples.SCHEDULE}}, 422),
)
async def look_up(request: Request, asked: Ask) -> Response:
    """The cached schedule of this problem, or of the nearest one that is valid on it."""
    sent = await request.body()
    return _json(await asked.service.checks.compute(lambda: _looked_up(asked, parse(Wanted, sent, "lookup"))))


def _looked_up(asked: Ask, wanted: Wanted) -> str:
    try:
        hit = asked.service.caches.of(asked.tenant).lookup(wanted.problem, wanted.objective)
    except InputError as error:  # the file's fault, not the question's
        raise ReplyError(503, f"The cache cannot be used: {error}", {"Retry-After": "60"}) from None
    return f'{{"hit":{_known(wanted.problem, hit) if hit else "null"}}}'


def _known(problem: Problem, hit: Hit) -> str:
    schedule = hit.schedule
    figures = {
        "exact": hit.exact,
        "distance": hit.distance,
        "status": hit.status,
        "lower_bound_ms": hit.lower_bound_ms,
        "makespan_ms": schedule.makespan_ms,
        "span_ms": schedule.span_ms,
    }
    document = ScheduleFile.of(schedule, hit.status, hit.lower_bound_ms).model_copy(update={"ops": None})
    return f'{text(figures)[:-1]},"schedule":{document.to_json()}}}'


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
