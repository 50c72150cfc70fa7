"""Problems without a profile: by formula, of the models and GPUs that are known (`optpipe.transformer`), and of what
another program has measured (`optpipe.measured`)."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response

from optpipe.errors import InputError
from optpipe.measured.convert import Run as MeasuredRun
from optpipe.measured.convert import problem_of
from optpipe.measured.estimate import Given
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS, preset
from optpipe_server.http import schemas
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import MOST_MICROBATCHES, MOST_STAGES, EstimateBody, MeasuredBody
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router

router = guarded_router("/v1", "tools")

PRESETS = schemas.Presets(
    models=[schemas.KnownModel.from_row(shape) for shape in MODELS.values()],
    gpus=[
        schemas.KnownGpu(name=name, memory_bytes=sheet.memory_bytes, source=sheet.source)
        for name, sheet in GPUS.items()
    ],
)


@router.get("/presets", dependencies=[READ])
async def presets() -> schemas.Presets:
    """The models of the papers and current ones, and GPUs by their data sheets."""
    return PRESETS


@router.post("/estimate", dependencies=[READ], response_model=schemas.Estimate)
async def estimate_problem(sent: EstimateBody, context: Context) -> Response:
    """The problem of training a known model on known GPUs, by formula."""
    return await context.computed(context.service.checks, lambda: _estimated(sent))


def _estimated(sent: EstimateBody) -> dict[str, Any]:
    if (stages := sent.parallelism.stages) > MOST_STAGES:
        raise InputError(f"estimate: parallelism: pp · chunks = {stages}: expected up to {MOST_STAGES} here")
    if (count := sent.run.microbatches) > MOST_MICROBATCHES:
        raise InputError(f"estimate: run.microbatches = {count}: expected up to {MOST_MICROBATCHES} here")
    estimated = estimate(preset(MODELS, "model", sent.model), sent.parallelism, preset(GPUS, "gpu", sent.gpu), sent.run)
    return {
        "problem": estimated.problem.to_dict(),
        "parameters": estimated.parameters,
        "state_bytes": [device.state for device in estimated.devices],
        "workspace_bytes": [device.workspace for device in estimated.devices],
        "reserved_bytes": [device.reserved for device in estimated.devices],
    }


@router.post("/problem-from/{form}", dependencies=[READ], response_model=schemas.Measured)
async def problem_from(form: str, sent: MeasuredBody, context: Context) -> Response:
    """The problem of what another program has measured: torch-trace, primus, straggler, megatron-timers, csv."""
    return await context.computed(context.service.checks, lambda: _measured(form, sent))


def _measured(form: str, sent: MeasuredBody) -> dict[str, Any]:
    measured = problem_of(
        form,
        [(file.name, file.text) for file in sent.files],
        Given(sent.activation_bytes, sent.activation_budget_bytes, sent.weight_share, sent.step, sent.replica),
        MeasuredRun(sent.microbatches, sent.devices, sent.chunks, sent.shape),
    )
    if (stages := len(measured.problem.stages)) > MOST_STAGES:
        raise InputError(f"problem-from: the files have {stages} stages: expected up to {MOST_STAGES} here")
    if (count := measured.problem.microbatches) > MOST_MICROBATCHES:
        raise InputError(f"problem-from: the files have {count} micro-batches: expected up to {MOST_MICROBATCHES} here")
    return measured.to_dict()
