"""Answers without a job: check, simulate and compare schedules, and look one up in the cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import gap, length_ms
from optpipe.formats.convert import schedule_from
from optpipe.model.records import Name, Record
from optpipe.options import CompareOptions, ObjectiveOption, TimeLimit
from optpipe.process.protocol import CompareRequest
from optpipe.schedule import Schedule, ScheduleFile, TimedOp, certify, check, timed_ops
from optpipe_cache import Hit
from optpipe_server.first_schedules import LARGE, size
from optpipe_server.http import examples, schemas
from optpipe_server.http.bodies import MOST_STAGES, ProblemBody, parse
from optpipe_server.http.compare_processes import CompareProcesses
from optpipe_server.http.context import Context
from optpipe_server.http.openapi import body, responses
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.views import text, uses

router = APIRouter(prefix="/v1", tags=["tools"])

MOST_WRONG = 50  # sentences in a reply
MOST_OPS = 10_000  # in a reply, the first ones
LONGEST_COMPARED_S = 60.0


class ScheduleBody(ProblemBody):
    """A problem, and a schedule document, which may have been made for another problem."""

    schedule: ScheduleFile

    def read(self) -> Schedule:
        """Return the schedule for the problem, or for the schedule's placement of it. Raises `InputError`."""
        file = self.schedule
        placed = file.placement.apply(self.problem) if file.placement else self.problem
        if len(placed.stages) > MOST_STAGES:
            raise InputError(f"schedule.placement makes {len(placed.stages)} stages: expected up to {MOST_STAGES} here")
        return Schedule.parse(
            placed, (device.program for device in file.devices), file.links, file.method, file.placement
        )


class ImportBody(ProblemBody):
    """The text of a file in another program's form: rows of PyTorch's actions if its `name` ends with .csv, otherwise
    lists of op texts."""

    name: Name
    text: str


class CompareBody(ProblemBody, CompareOptions):
    """`POST /v1/compare`."""

    time_limit_s: Annotated[TimeLimit, Field(le=LONGEST_COMPARED_S)] = 10.0


class LookupBody(ProblemBody):
    """`POST /v1/cache/lookup`."""

    objective: ObjectiveOption = "makespan"


class CheckReply(Record):
    """Whether a schedule is valid. `wrong` has a sentence per fault; `devices` is null if memory cannot be computed."""

    valid: bool
    wrong: list[str]
    devices: list[schemas.DeviceUse] | None


class ImportReply(CheckReply):
    """The schedule of the file, and what `/v1/check` says of it. `schedule` is null if its ops have no times; `wrong`
    tells why."""

    schedule: ScheduleFile | None


class SimulationReply(Record):
    """A schedule by nominal times, even if it needs too much memory; `ops` are the first by start of `ops_total`."""

    makespan_ms: float
    span_ms: float
    bubble: float  # share of the makespan in which devices do not compute
    ops: list[TimedOp]
    ops_total: int
    devices: list[schemas.DeviceUse]


class CompareRow(Record):
    """One method: the figures of its schedule, and why it does not fit or does not apply to the problem."""

    method: str
    placements: str
    found_by: str | None
    fits: bool
    makespan_ms: float | None
    span_ms: float | None
    percentile_ms: float | None  # of the objective, where there is jitter
    bubble: float | None
    lower_bound_ms: float | None
    gap: float | None
    placement: dict[str, Any] | None
    peak_bytes: list[int] | None
    host_peak_bytes: list[int] | None
    reason: str | None
    notes: list[str]  # of a search, such as how the MILP's ended


class CompareReply(Record):
    """The rows that fit, the shortest first, then the others: what `optpipe compare --json` prints."""

    problem: str
    options: CompareOptions  # with the threads and the memory that each search had
    k: list[float | None]
    rows: list[CompareRow]


class CacheHit(Record):
    """A cached schedule, verified on this problem. `distance` is 0 if it was solved for this problem (`exact`); `terms`
    is what each feature adds to it. `gap` says by which share a schedule could be shorter at most; it and the bound are
    null unless it is `exact` and a bound is known."""

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


class LookupReply(Record):
    """`hit` is null if no similar problem is known."""

    hit: CacheHit | None


def _compare_processes(request: Request) -> CompareProcesses:
    processes: CompareProcesses = request.app.state.compare_processes
    return processes


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
    "percentile_ms": None,
    "bubble": 0.33,
    "lower_bound_ms": 8.0,
    "gap": 0.11,
    "placement": None,
    "peak_bytes": [2000, 1000],
    "host_peak_bytes": [0, 0],
    "reason": None,
    "notes": [],
}
_COMPARED = {"problem": "", "options": CompareOptions().model_dump(), "k": [0.5], "rows": [_ROW]}
_KNOWN = {
    "exact": False,
    "source": "cache",
    "distance": 0.05,
    "terms": {"memory": 0.03, "forward": 0.02},
    "status": "feasible",
    "lower_bound_ms": None,
    "gap": None,
    "makespan_ms": 9.0,
    "span_ms": 9.0,
}


@router.post("/check", openapi_extra=body(ScheduleBody, _BOTH), responses=responses(200, CheckReply, _CHECKED, 422))
async def check_schedule(request: Request, context: Context) -> Response:
    """Whether a schedule is valid: its ops can run in their order, and no device needs more memory than it has."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(context.tenant, lambda: text(_checked(parse(ScheduleBody, sent, "check"))))
    )


@router.post(
    "/import",
    openapi_extra=body(ImportBody, {"problem": examples.PROBLEM, "name": "theirs.csv", "text": examples.ROWS}),
    responses=responses(200, ImportReply, {**_CHECKED, "schedule": examples.SCHEDULE}, 422),
)
async def import_schedule(request: Request, context: Context) -> Response:
    """A schedule that another program wrote, such as PyTorch's pipelining, as a document, and whether it is valid."""
    sent = await request.body()
    return _json(await context.service.checks.run(context.tenant, lambda: _imported(parse(ImportBody, sent, "import"))))


def _imported(sent: ImportBody) -> str:
    schedule = schedule_from(sent.text, sent.problem, sent.name)
    try:
        document = ScheduleFile.of(schedule).model_copy(update={"ops": None}).to_json()
    except ScheduleError:
        document = "null"
    return f'{text(_judged(schedule))[:-1]},"schedule":{document}}}'


def _checked(sent: ScheduleBody) -> dict[str, Any]:
    return _judged(sent.read())


def _judged(schedule: Schedule) -> dict[str, Any]:
    wrong = check(schedule.problem, schedule)
    try:
        devices = uses(certify(schedule.problem, schedule))
    except ScheduleError:  # for other stages or micro-batches, as `wrong` tells
        devices = None
    return {"valid": not wrong, "wrong": wrong[:MOST_WRONG], "devices": devices}


@router.post(
    "/simulate", openapi_extra=body(ScheduleBody, _BOTH), responses=responses(200, SimulationReply, _SIMULATED, 422)
)
async def simulate_schedule(request: Request, context: Context) -> Response:
    """When each op runs, by nominal times, and the most memory that each device holds."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(
            context.tenant, lambda: text(_simulated(parse(ScheduleBody, sent, "simulate")))
        )
    )


def _simulated(sent: ScheduleBody) -> dict[str, Any]:
    try:
        schedule = sent.read()
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
    openapi_extra=body(CompareBody, examples.COMPARE),
    responses=responses(200, CompareReply, _COMPARED, 422),
)
async def compare_methods(
    request: Request, context: Context, processes: Annotated[CompareProcesses, Depends(_compare_processes)]
) -> Response:
    """Compare every published schedule, every heuristic and the solver's answer, or the methods given, on one problem.

    It takes up to the time limit for each search and some seconds, and ends if the client disconnects.
    """
    sent = await request.body()
    compare = await context.service.checks.run(context.tenant, lambda: _comparable(parse(CompareBody, sent, "compare")))
    return _json(await processes.run(context.tenant, request, CompareRequest.model_validate(dict(compare))))


def _comparable(compare: CompareBody) -> CompareBody:
    if (parts := size(compare.problem)) > LARGE:
        raise InputError(
            f"compare: problem has {parts} activation parts, over stages and micro-batches: expected up to {LARGE} here"
        )
    return compare


@router.post(
    "/cache/lookup",
    openapi_extra=body(LookupBody, {"problem": examples.PROBLEM, "objective": "makespan"}),
    responses=responses(200, LookupReply, {"hit": {**_KNOWN, "schedule": examples.SCHEDULE}}, 422),
)
async def look_up(request: Request, context: Context) -> Response:
    """The cached schedule of this problem, or of the most similar one whose schedule is valid for it."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(context.tenant, lambda: _looked_up(context, parse(LookupBody, sent, "lookup")))
    )


def _looked_up(context: Context, lookup: LookupBody) -> str:
    try:
        hit = context.service.caches.of(context.tenant).lookup(lookup.problem, lookup.objective)
    except InputError as error:  # not the client's mistake
        raise ReplyError(503, f"The cache cannot be used: {error}", {"Retry-After": "60"}) from None
    return f'{{"hit":{_known(lookup, hit) if hit else "null"}}}'


def _known(lookup: LookupBody, hit: Hit) -> str:
    schedule = hit.schedule
    figures = {
        "exact": hit.exact,
        "source": hit.source,
        "distance": hit.distance,
        "terms": hit.terms,
        "status": hit.status,
        "lower_bound_ms": hit.lower_bound_ms,
        "gap": gap(length_ms(schedule, lookup.objective), hit.lower_bound_ms),
        "makespan_ms": schedule.makespan_ms,
        "span_ms": schedule.span_ms,
    }
    document = ScheduleFile.of(schedule, hit.status, hit.lower_bound_ms).model_copy(update={"ops": None})
    return f'{text(figures)[:-1]},"schedule":{document.to_json()}}}'


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
