"""Searches of real models: an engine, a heuristic or a published schedule that fails is a fault, not a note."""

from __future__ import annotations

from typing import Any

import pytest
from support.problems import with_budgets

from optpipe import improve
from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_solver.methods import ENGINES

SHAPES: list[dict[str, Any]] = [
    {"pp": 4, "tp": 8, "dp": 8, "zero": 3},
    {"pp": 8, "tp": 8, "dp": 8, "zero": 1, "chunks": 2},
    {"pp": 4, "tp": 8, "dp": 8, "zero": 1, "chunks": 2, "shape": "v"},
    {"pp": 16, "tp": 8, "dp": 8, "zero": 1},
]
FAULTS = ("failed", "rejected", "gives no schedule", "claims a bound", "Error")


def posed(model: str, memory: float = 1.0, per_device: int = 4, **shape: Any) -> Problem:
    """A model on H100s with a share of the memory that is left for its activations."""
    run = Run(microbatches=per_device * shape["pp"])
    problem = estimate(MODELS[model], Parallelism.from_dict(shape, "shape"), GPUS["H100"], run).problem
    return with_budgets(problem, [round(memory * device.activation_budget_bytes) for device in problem.devices])


def no_engine_fails(problem: Problem, **options: Any) -> None:
    *_, last = improve(problem, **options)
    assert [note for note in last.notes if any(fault in note for fault in FAULTS)] == []
    assert (last.failure, last.rejected) == (None, 0)


@pytest.mark.soak  # half an hour
@pytest.mark.parametrize("placements", ["keep", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("model", sorted(MODELS))
def test_no_engine_fails_on_any_model(model: str, shape: dict[str, Any], placements: str) -> None:
    memory = (1.0, 0.5, 0.2)[sorted(MODELS).index(model) % 3]
    try:
        problem = posed(model, memory, **shape)
    except InputError as error:
        pytest.skip(str(error))  # too large for these GPUs, or fewer layers than stages
    no_engine_fails(problem, time_limit_s=10.0, placements=placements)


@pytest.mark.soak
@pytest.mark.parametrize("method", [*ENGINES, "auto"])
@pytest.mark.parametrize("options", [{}, {"objective": "span"}, {"threads": 1}], ids=str)
def test_nor_by_itself_on_many_micro_batches(method: str, options: dict[str, Any]) -> None:
    problem = posed("llama-3-405b", per_device=8, pp=16, tp=8, dp=8, zero=1)
    no_engine_fails(problem, method=method, time_limit_s=30.0 if method == "auto" else 10.0, **options)
