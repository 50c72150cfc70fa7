"""Answers without a job: check, simulate and compare schedules, and look one up in the cache."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response

from optpipe.comparison import searches
from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import gap, length_ms
from optpipe.formats.convert import schedule_from
from optpipe.model.ops import MARKS
from optpipe.process.protocol import CompareRequest
from optpipe.schedule import Schedule, certify, check
from optpipe_server.first_schedules import NOISY
from optpipe_server.http import schemas
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import CompareBody, ImportBody, LookupBody, ScheduleBody, require_parts
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.own_processes import run_process
from optpipe_server.http.replies import ReplyError, json_reply
from optpipe_server.http.results import times
from optpipe_server.http.stored import document
from optpipe_server.settings import within

router = guarded_router("/v1", "tools")

MODULE = "optpipe_server.compare_process"
EXTRA_S = 120.0  # for methods that need no search, and for processes to start and end on a busy machine
MOST_WRONG = 50  # sentences in a reply
MOST_OPS = 10_000  # in a reply, the first ones
MOST_COMPARED = 2**14  # activation parts: about 600 MiB and half a minute, in processes of their own


@router.post("/check", dependencies=[READ], response_model=schemas.Checked)
async def check_schedule(sent: ScheduleBody, context: Context) -> Response:
    """Whether a schedule is valid: its ops can run in their order, and no device needs more memory than it has."""
    return await context.computed(context.service.checks, lambda: _checked(sent.read()))


@router.post("/import", dependencies=[READ], response_model=schemas.Imported)
async def import_schedule(sent: ImportBody, context: Context) -> Response:
    """A schedule that another program wrote, such as PyTorch's pipelining, as a document, and whether it is valid."""

    def imported() -> dict[str, Any]:
        schedule = schedule_from(sent.text, sent.problem, sent.name)
        try:
            file = document(schedule)
        except ScheduleError:
            file = None
        return {**_checked(schedule), "schedule": file}

    return await context.computed(context.service.checks, imported)


def _checked(schedule: Schedule) -> dict[str, Any]:
    """What a `Checked` says."""
    wrong = check(schedule.problem, schedule)
    try:
        devices = schemas.device_uses(certify(schedule.problem, schedule))
    except ScheduleError:  # for other stages or micro-batches, as `wrong` tells
        devices = None
    return {"valid": not wrong, "wrong": wrong[:MOST_WRONG], "devices": devices}


@router.post("/simulate", dependencies=[READ], response_model=schemas.Simulation)
async def simulate_schedule(sent: ScheduleBody, context: Context) -> Response:
    """When each op runs, by nominal times, and the most memory that each device holds."""

    def simulated() -> dict[str, Any]:
        try:
            schedule = sent.read()
            figures = times(schedule, MOST_OPS)
        except ScheduleError as error:
            raise InputError(f"simulate: schedule: {str(error).partition(chr(10))[0]}") from None
        return {**figures, "ops_total": int((~schedule.compiled.rows.of_kinds(*MARKS)).sum())}

    return await context.computed(context.service.checks, simulated)


@router.post("/compare", dependencies=[READ], response_model=schemas.Comparison)
async def compare_methods(sent: CompareBody, context: Context) -> Response:
    """Compare every published schedule, every heuristic and the solver's answer, or the methods given, on one problem.

    It takes up to the time limit for each search and some seconds, and ends if the client disconnects.
    """
    require_parts(sent.problem, "compare: problem", MOST_COMPARED // (NOISY if sent.jitter else 1))
    compare = CompareRequest.model_validate(dict(sent))
    settings = context.service.settings
    limits = {
        "threads": within(compare.threads, settings.threads_per_solve),
        "memory_mib": within(compare.memory_mib, settings.memory_mib),
    }
    request = compare.model_copy(update=limits).model_dump_json(exclude_none=True)
    limit_s = len(searches(compare)) * compare.time_limit_s + EXTRA_S
    async with context.cancelled_on_disconnect():
        with context.service.own_processes.one(context.tenant, compare.time_limit_s):
            return json_reply(await run_process(MODULE, "compare", request, limit_s))
    raise ReplyError(408, "The client disconnected.")


@router.post("/cache/lookup", dependencies=[READ], response_model=schemas.Lookup)
async def look_up(sent: LookupBody, context: Context) -> Response:
    """The cached schedule of this problem, or of the most similar one whose schedule is valid for it."""
    return await context.computed(context.service.checks, lambda: {"hit": _looked_up(sent, context)})


def _looked_up(sent: LookupBody, context: Context) -> dict[str, Any] | None:
    """What a `CacheHit` says."""
    try:
        hit = context.service.caches.cache_of(context.tenant).lookup(sent.problem, sent.objective)
    except InputError as error:  # not the client's mistake
        raise ReplyError(503, f"The cache cannot be used: {error}", {"Retry-After": "60"}) from None
    if hit is None:
        return None
    return {
        "exact": hit.exact,
        "source": hit.source,
        "distance": hit.distance,
        "terms": hit.terms,
        "status": hit.status,
        "lower_bound_ms": hit.lower_bound_ms,
        "gap": gap(length_ms(hit.schedule, sent.objective), hit.lower_bound_ms),
        "makespan_ms": hit.schedule.makespan_ms,
        "span_ms": hit.schedule.span_ms,
        "schedule": document(hit.schedule, status=hit.status, lower_bound_ms=hit.lower_bound_ms),
    }
