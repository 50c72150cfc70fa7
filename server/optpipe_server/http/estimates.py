"""Problems by formula: the models and GPUs that are known, and what one costs on the other (`optpipe.transformer`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.model.records import Record
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


def _json(content: dict[str, Any]) -> Response:
    return Response(text(content), media_type="application/json")
