"""What a `CostModel` learns of micro-batches (`optpipe.steps.cost_model`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.problems import pipeline, stage

from optpipe import InputError, Problem
from optpipe.steps import CostModel, StepScheduler

FIGURES = ("forward_ms", "activation_bytes")


def drawn(n: int, seed: int = 0) -> list[dict[str, float]]:
    random = np.random.default_rng(seed)
    tokens = random.integers(1000, 9000, n).tolist()
    return [
        {"tokens": float(t), "squares": float(t) ** 2 / k}
        for t, k in zip(tokens, random.integers(1, 9, n), strict=True)
    ]


def took(microbatches: list[dict[str, float]], noise: float = 0.0, seed: int = 0) -> list[dict[str, list[float]]]:
    """Of two stages: F from tokens, squares and a constant; bytes from tokens."""
    random = np.random.default_rng(seed)
    ms = [2.0 + 3e-3 * m["tokens"] + 4e-7 * m["squares"] for m in microbatches]
    noisy = [value * factor for value, factor in zip(ms, 1 + noise * random.standard_normal(len(ms)), strict=True)]
    nbytes = [500.0 * m["tokens"] for m in microbatches]
    return [
        {"forward_ms": noisy, "activation_bytes": nbytes},
        {"forward_ms": [5.0] * len(ms), "activation_bytes": nbytes},
    ]


def model_of(noise: float = 0.0, outliers: int = 0) -> CostModel:
    model = CostModel(("tokens", "squares"), 2, FIGURES)
    for step in range(8):
        microbatches = drawn(16, step)
        measured = took(microbatches, noise, step)
        for j in range(outliers):
            measured[0]["forward_ms"][j] *= 20
        model.learn(microbatches, measured)
    return model


def template() -> Problem:
    return pipeline(2, 4, 2**40, stage())


@pytest.mark.parametrize(
    ("noise", "outliers", "off"), [(0.0, 0, 1e-6), (0.02, 0, 0.02), (0.0, 2, 0.005), (0.02, 2, 0.03)]
)
def test_figures_follow_from_features_also_after_they_were_kept(
    noise: float, outliers: int, off: float, tmp_path: Path
) -> None:
    model, microbatches = model_of(noise, outliers), drawn(5, 99)
    problem = model.problem(template(), microbatches)
    assert problem.microbatches == 5
    assert problem.stages[0].forward_ms == pytest.approx(took(microbatches)[0]["forward_ms"], rel=off)
    assert problem.stages[1].forward_ms == pytest.approx([5.0] * 5, rel=1e-6)
    assert problem.stages[0].activation_bytes == pytest.approx(took(microbatches)[0]["activation_bytes"], abs=1.1)
    assert problem.stages[0].backward_input_ms == template().stages[0].backward_input_ms
    model.save(tmp_path / "model.json")
    kept = CostModel.load(tmp_path / "model.json")
    assert (kept.errors(), kept.problem(template(), microbatches).sha256) == (model.errors(), problem.sha256)


def test_errors_are_those_of_predictions_made_before() -> None:
    model, first, second = CostModel(("tokens",), 1, ("forward_ms",)), [{"tokens": 100}], [{"tokens": 200}]
    assert model.errors() is None
    model.learn(first * 2 + [{"tokens": 50}], [{"forward_ms": [10.0, 10.0, 5.0]}])
    assert model.errors() is None
    model.learn(second, [{"forward_ms": [40.0]}])
    assert model.errors() == [{"forward_ms": pytest.approx(0.5)}]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "optpipe.cost-model/9"}, "format"),
        ({"inputs": [[1.0]] * 3}, "outputs has 128 entries"),
        ({"inputs": [[1.0]] * 128}, r"inputs\[0\] has 1 entries"),
        ({"stages": 3}, r"outputs\[0\]: 3 stages"),
        ({"inputs": [[1.0, -1.0]] * 128}, r"inputs\[0\]\[1\]"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "model.json"
    model_of().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=complaint):
        CostModel.load(path)


@pytest.mark.parametrize(
    ("microbatches", "measured", "complaint"),
    [
        ([], [{}, {}], "microbatches is empty"),
        ([{"tokens": 1}], [{}, {}], r"microbatches\[0\].squares is missing"),
        ([{"tokens": float("nan"), "squares": 1}], [{}, {}], r"microbatches\[0\].tokens = nan"),
        ([{"tokens": 1, "squares": 1}], [{}], "measured has 1 entries"),
        ([{"tokens": 1, "squares": 1}], [{}, {}], r"measured\[0\].forward_ms is missing"),
        ([{"tokens": 1, "squares": 1}], [{"forward_ms": [1, 2]}, {}], "has 2 entries"),
        ([{"tokens": 1, "squares": 1}], [{"forward_ms": [-1]}, {}], r"forward_ms\[0\] = -1"),
    ],
)
def test_what_cannot_be_learnt_is_refused(microbatches: Any, measured: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        CostModel(("tokens", "squares"), 2, FIGURES).learn(microbatches, measured)
    with pytest.raises(InputError, match="did you mean forward_ms"):
        CostModel(("tokens",), 1, ("forwards_ms",))


def test_bytes_are_no_less_than_those_seen() -> None:
    model = CostModel(("tokens",), 1, ("activation_bytes",))
    model.learn([{"tokens": 10}] * 3, [{"activation_bytes": [100, 100, 150]}])
    one = template().replace(stages=template().stages[:1], devices=template().devices[:1])
    assert model.problem(one, [{"tokens": 10}]).stages[0].activation_bytes[0] >= 150  # type: ignore[index]


def test_a_step_is_scheduled_by_its_features() -> None:
    planned = StepScheduler(template(), model_of()).plan(drawn(5), improve=False)
    assert planned.problem.microbatches == 5
    assert planned.first.makespan_ms >= sum(took(drawn(5))[0]["forward_ms"])
    with pytest.raises(InputError, match="costs is missing"):
        StepScheduler(template()).plan(drawn(5))
