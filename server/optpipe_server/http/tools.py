"""Answers without a job: check, simulate and import schedules, look one up in the cache, and make a problem by formula
(`optpipe.transformer`) or of what another program has measured (`optpipe.measured`)."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import Response

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import gap, length_ms
from optpipe.formats.convert import schedule_from
from optpipe.measured.convert import Run as MeasuredRun
from optpipe.measured.convert import problem_of
from optpipe.measured.measurements import Given
from optpipe.model.ops import MARKS
from optpipe.model.problem import Problem
from optpipe.model.records import Record
from optpipe.schedule import Schedule, ScheduleFile, certify, check
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS, preset
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import (
    EstimateBody,
    ImportBody,
    LookupBody,
    MeasuredBody,
    ScheduleBody,
    require_counts,
)
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.results import DeviceUse, Times, device_uses, times
from optpipe_server.http.schemas import FromRow

router = guarded_router("/v1", "tools")

MOST_WRONG = 50  # sentences in a reply
MOST_OPS = 10_000  # in a reply, the first ones


class Checked(Record):
    """Whether a schedule is valid. `wrong` has a sentence per fault; `devices` is null if memory cannot be computed."""

    valid: bool
    wrong: list[str]
    devices: list[DeviceUse] | None


@router.post("/check", dependencies=[READ], response_model=Checked)
async def check_schedule(sent: ScheduleBody, context: Context) -> Response:
    """Whether a schedule is valid: its ops can run in their order, and no device needs more memory than it has."""
    return await context.computed(context.service.checks, lambda: checked(sent.read()))


class Imported(Checked):
    """The schedule of the file, and what `/v1/check` says of it. `schedule` is null if its ops have no times; `wrong`
    tells why."""

    schedule: ScheduleFile | None


@router.post("/import", dependencies=[READ], response_model=Imported)
async def import_schedule(sent: ImportBody, context: Context) -> Response:
    """A schedule that another program wrote, such as PyTorch's pipelining, as a document, and whether it is valid."""

    def imported() -> dict[str, Any]:
        schedule = schedule_from(sent.text, sent.problem, sent.name)
        try:
            file = _document(schedule)
        except ScheduleError:
            file = None
        return {**checked(schedule), "schedule": file}

    return await context.computed(context.service.checks, imported)


def checked(schedule: Schedule) -> dict[str, Any]:
    """Return what a `Checked` says."""
    wrong = check(schedule.problem, schedule)
    try:
        devices = device_uses(certify(schedule.problem, schedule))
    except ScheduleError:  # for other stages or micro-batches, as `wrong` tells
        devices = None
    return {"valid": not wrong, "wrong": wrong[:MOST_WRONG], "devices": devices}


def _document(schedule: Schedule, **known: Any) -> dict[str, Any]:
    """The document of a schedule, without the times of ops, with what is `known` of it."""
    return ScheduleFile.from_schedule(schedule, with_ops=False, **known).model_dump(mode="json", exclude_none=True)


class Simulation(Times):
    """Of a schedule, even if it needs too much memory; `ops` are the first by start of `ops_total`."""

    ops_total: int


@router.post("/simulate", dependencies=[READ], response_model=Simulation)
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


class Lookup(Record):
    """`hit` is null if no similar problem is known."""

    hit: CacheHit | None


@router.post("/cache/lookup", dependencies=[READ], response_model=Lookup)
async def look_up(sent: LookupBody, context: Context) -> Response:
    """The cached schedule of this problem, or of the most similar one whose schedule is valid for it."""

    def looked_up() -> dict[str, Any] | None:
        try:
            hit = context.service.caches.cache_of(context.tenant).lookup(sent.problem, sent.objective)
        except InputError as error:  # not the client's mistake
            raise ReplyError(503, f"The cache cannot be used: {error}", retry_s=60) from None
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
            "schedule": _document(hit.schedule, status=hit.status, lower_bound_ms=hit.lower_bound_ms),
        }

    return await context.computed(context.service.checks, lambda: {"hit": looked_up()})


class KnownModel(FromRow):
    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int | None
    source: str


class KnownGpu(Record):
    name: str
    memory_bytes: int
    source: str


class Presets(Record):
    """What `POST /v1/estimate` knows by name."""

    models: list[KnownModel]
    gpus: list[KnownGpu]


@router.get("/presets", dependencies=[READ])
async def presets() -> Presets:
    """The models of the papers and current ones, and GPUs by their data sheets."""
    return Presets(
        models=[KnownModel.from_row(shape) for shape in MODELS.values()],
        gpus=[
            KnownGpu(name=name, memory_bytes=sheet.memory_bytes, source=sheet.source) for name, sheet in GPUS.items()
        ],
    )


class Estimate(Record):
    """The problem, and the bytes of each device's GPU that weights, gradients and optimizer state, workspace, and what
    the driver reserves take; the rest is the budget for activations."""

    problem: Problem
    parameters: int
    state_bytes: list[int]
    workspace_bytes: list[int]
    reserved_bytes: list[int]


@router.post("/estimate", dependencies=[READ], response_model=Estimate)
async def estimate_problem(sent: EstimateBody, context: Context) -> Response:
    """The problem of training a known model on known GPUs, by formula."""

    def estimated() -> dict[str, Any]:
        require_counts("estimate: parallelism and run give", sent.parallelism.stages, sent.run.microbatches)
        answer = estimate(
            preset(MODELS, "model", sent.model), sent.parallelism, preset(GPUS, "gpu", sent.gpu), sent.run
        )
        return {
            "problem": answer.problem.to_dict(),
            "parameters": answer.parameters,
            "state_bytes": [device.state for device in answer.devices],
            "workspace_bytes": [device.workspace for device in answer.devices],
            "reserved_bytes": [device.reserved for device in answer.devices],
        }

    return await context.computed(context.service.checks, estimated)


@router.post("/problem-from/{form}", dependencies=[READ], response_model=dict[str, Any])
async def problem_from(form: str, sent: MeasuredBody, context: Context) -> Response:
    """The problem of what another program has measured: torch-trace, primus, straggler, megatron-timers, csv.

    With it come the times of each stage's ops and of a message (median and interquartile range), how long a step took
    and how long its order takes by these times, what is not known, what was measured and is not used, and the order.
    """

    def measured() -> dict[str, Any]:
        measurements = problem_of(
            form,
            [(file.name, file.text) for file in sent.files],
            Given(sent.activation_bytes, sent.activation_budget_bytes, sent.weight_share, sent.step, sent.replica),
            MeasuredRun(sent.microbatches, sent.devices, sent.chunks, sent.shape),
        )
        require_counts(
            "problem-from: the files have", len(measurements.problem.stages), measurements.problem.microbatches
        )
        return measurements.to_dict()

    return await context.computed(context.service.checks, measured)
