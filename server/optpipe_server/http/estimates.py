"""Problems without a profile: by formula, of the models and GPUs that are known (`optpipe.transformer`), and of what
another program has measured (`optpipe.measured`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from optpipe.errors import InputError
from optpipe.measured.convert import Run as MeasuredRun
from optpipe.measured.convert import problem_of
from optpipe.measured.estimate import Given
from optpipe.model.problem import Problem
from optpipe.model.records import Bytes, Items, Name, Record
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS, preset
from optpipe.transformer.records import Parallelism, Run
from optpipe_server.http import examples
from optpipe_server.http.bodies import MOST_MICROBATCHES, MOST_STAGES, parse
from optpipe_server.http.context import Context
from optpipe_server.http.openapi import body, responses
from optpipe_server.http.views import text

router = APIRouter(prefix="/v1", tags=["tools"])


class KnownModel(Record):
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


class EstimateBody(Record):
    """`POST /v1/estimate`."""

    model: str
    gpu: str
    parallelism: Parallelism
    run: Run


class EstimateReply(Record):
    """The problem, and the bytes of each device's GPU that weights, gradients and optimizer state, workspace, and what
    the driver reserves take; the rest is the budget for activations."""

    problem: Problem
    parameters: int
    state_bytes: list[int]
    workspace_bytes: list[int]
    reserved_bytes: list[int]


class MeasuredFile(Record):
    """A file that the other program wrote; of `primus`, each of the folder."""

    name: Name
    text: str


class MeasuredBody(Record):
    """`POST /v1/problem-from/{form}`: the files, and what they do not say. An activation's bytes are those of all
    stages, or of each."""

    files: Annotated[Items[MeasuredFile], Field(min_length=1, max_length=MOST_STAGES + 1)]
    activation_bytes: Annotated[Items[Bytes], Field(min_length=1)] | None = None
    activation_budget_bytes: Bytes | None = None
    weight_share: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    microbatches: Annotated[int, Field(strict=True, ge=1, le=MOST_MICROBATCHES)] | None = None
    devices: Annotated[int, Field(strict=True, ge=1, le=MOST_STAGES)] | None = None
    chunks: Annotated[int, Field(strict=True, ge=1, le=MOST_STAGES)] = 1
    shape: Literal["looped", "v"] = "looped"


class MeasuredTimes(Record):
    """Median and interquartile range of `count` times, in ms."""

    ms: float
    iqr_ms: float
    count: int


class MeasuredReply(Record):
    """The problem, the times of each stage's F, B, W or BW and of a message, how long a step took and how long its
    order takes by these times, and what is not known, with what the problem has instead."""

    problem: Problem
    stages: list[dict[str, MeasuredTimes]]
    message: MeasuredTimes | None
    measured_ms: float | None
    replayed_ms: float | None
    unknown: list[str]


_PRESETS: dict[str, Any] = {
    "models": [
        {
            "name": shape.name,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "sequence": shape.sequence,
            "source": shape.source,
        }
        for shape in MODELS.values()
    ],
    "gpus": [
        {"name": name, "memory_bytes": sheet.memory_bytes, "source": sheet.source} for name, sheet in GPUS.items()
    ],
}


@router.get("/presets", responses=responses(200, Presets, _PRESETS))
async def presets(context: Context) -> Response:
    """The models of the papers and current ones, and GPUs by their data sheets."""
    return _json(_PRESETS)


@router.post(
    "/estimate",
    openapi_extra=body(EstimateBody, examples.ESTIMATE),
    responses=responses(200, EstimateReply, examples.ESTIMATED, 422),
)
async def estimate_problem(request: Request, context: Context) -> Response:
    """The problem of training a known model on known GPUs, by formula."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(context.tenant, lambda: _estimated(parse(EstimateBody, sent, "estimate")))
    )


def _estimated(asked: EstimateBody) -> dict[str, Any]:
    if (stages := asked.parallelism.stages) > MOST_STAGES:
        raise InputError(f"estimate: parallelism: pp · chunks = {stages}: expected up to {MOST_STAGES} here")
    if (count := asked.run.microbatches) > MOST_MICROBATCHES:
        raise InputError(f"estimate: run.microbatches = {count}: expected up to {MOST_MICROBATCHES} here")
    made = estimate(preset(MODELS, "model", asked.model), asked.parallelism, preset(GPUS, "gpu", asked.gpu), asked.run)
    return {
        "problem": made.problem.to_dict(),
        "parameters": made.parameters,
        "state_bytes": [device.state for device in made.devices],
        "workspace_bytes": [device.workspace for device in made.devices],
        "reserved_bytes": [device.reserved for device in made.devices],
    }


@router.post(
    "/problem-from/{form}",
    openapi_extra=body(MeasuredBody, examples.MEASURED),
    responses=responses(200, MeasuredReply, examples.PROBLEM_FROM, 422),
)
async def problem_from(form: str, request: Request, context: Context) -> Response:
    """The problem of what another program has measured: torch-trace, primus, megatron-timers or csv."""
    sent = await request.body()
    return _json(
        await context.service.checks.run(
            context.tenant, lambda: _measured(form, parse(MeasuredBody, sent, "problem-from"))
        )
    )


def _measured(form: str, sent: MeasuredBody) -> dict[str, Any]:
    found = problem_of(
        form,
        [(file.name, file.text) for file in sent.files],
        Given(sent.activation_bytes, sent.activation_budget_bytes, sent.weight_share),
        MeasuredRun(sent.microbatches, sent.devices, sent.chunks, sent.shape),
    )
    if (stages := len(found.problem.stages)) > MOST_STAGES:
        raise InputError(f"problem-from: the files have {stages} stages: expected up to {MOST_STAGES} here")
    if (count := found.problem.microbatches) > MOST_MICROBATCHES:
        raise InputError(f"problem-from: the files have {count} micro-batches: expected up to {MOST_MICROBATCHES} here")
    return found.to_dict()


def _json(content: dict[str, Any]) -> Response:
    return Response(text(content), media_type="application/json")
