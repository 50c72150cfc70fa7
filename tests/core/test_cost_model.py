"""What a `CostModel` learns of micro-batches, and documents packed into micro-batches by it (`optpipe.steps`)."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.problems import pipeline, stage

from optpipe import InputError
from optpipe.model.records import COMPUTE_MS
from optpipe.steps import CostModel, Packing, StepScheduler, assign, pack

FIGURES = ("forward_ms", "activation_bytes")
TEMPLATE = pipeline(2, 4, 2**40, stage())


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


@pytest.mark.parametrize(
    ("noise", "outliers", "off"), [(0.0, 0, 1e-6), (0.02, 0, 0.02), (0.0, 2, 0.005), (0.02, 2, 0.03)]
)
def test_figures_follow_from_features_also_after_they_were_kept(
    noise: float, outliers: int, off: float, tmp_path: Path
) -> None:
    model, microbatches = model_of(noise, outliers), drawn(5, 99)
    problem = model.problem(TEMPLATE, microbatches)
    assert problem.microbatches == 5
    assert problem.stages[0].forward_ms == pytest.approx(took(microbatches)[0]["forward_ms"], rel=off)
    assert problem.stages[1].forward_ms == pytest.approx([5.0] * 5, rel=1e-6)
    assert problem.stages[0].activation_bytes == pytest.approx(took(microbatches)[0]["activation_bytes"], abs=1.1)
    assert problem.stages[0].backward_input_ms == TEMPLATE.stages[0].backward_input_ms
    model.save(tmp_path / "model.json")
    kept = CostModel.load(tmp_path / "model.json")
    assert (kept.errors(), kept.problem(TEMPLATE, microbatches).sha256) == (model.errors(), problem.sha256)


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
    one = TEMPLATE.replace(stages=TEMPLATE.stages[:1], devices=TEMPLATE.devices[:1])
    assert model.problem(one, [{"tokens": 10}]).stages[0].activation_bytes[0] >= 150  # type: ignore[index]


def test_a_step_is_scheduled_by_its_features() -> None:
    planned = StepScheduler(TEMPLATE, model_of()).plan(drawn(5), improve=False)
    assert planned.problem.microbatches == 5
    assert planned.first.makespan_ms >= sum(took(drawn(5))[0]["forward_ms"])
    with pytest.raises(InputError, match="costs is missing"):
        StepScheduler(TEMPLATE).plan(drawn(5))


def documents_of(n: int, seed: int) -> list[dict[str, float]]:
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.0, n).clip(16, 8192).astype(int)
    return [{"tokens": float(length), "squares": float(length) ** 2} for length in drawn.tolist()]


@pytest.fixture(scope="module")
def costs() -> CostModel:
    costs = CostModel(("tokens", "squares"), 2, (*COMPUTE_MS, "activation_bytes"))
    documents = documents_of(64, 0)
    ms = [1.0 + 2e-3 * each["tokens"] + 5e-7 * each["squares"] for each in documents]
    nbytes = [100 * each["tokens"] for each in documents]
    costs.learn(documents, [dict.fromkeys(COMPUTE_MS, ms) | {"activation_bytes": nbytes}] * 2)
    return costs


def packed(
    costs: CostModel, documents: list[dict[str, float]], microbatches: int, most: float, replicas: int = 1
) -> Packing:
    return pack(documents, microbatches, {"tokens": most}, partial(costs.problem, TEMPLATE), costs, replicas)


@pytest.mark.parametrize(("microbatches", "replicas", "most"), [(4, 1, 16_384), (8, 2, 9_000), (3, 3, 1e9)])
def test_each_document_is_packed_once_within_limits(
    costs: CostModel, microbatches: int, replicas: int, most: float
) -> None:
    documents = documents_of(24, 5)
    packing = packed(costs, documents, microbatches, most, replicas)
    assert sorted(sum(packing.documents, ())) == list(range(24))
    assert all(0 < sum(documents[i]["tokens"] for i in each) <= most for each in packing.documents)
    assert sorted(sum(packing.assignment.microbatches, ())) == list(range(microbatches))


@pytest.mark.parametrize("seed", range(2))
def test_no_other_packing_of_a_few_documents_is_faster_by_much(costs: CostModel, seed: int) -> None:
    documents = documents_of(6, seed)

    def slowest_ms(places: tuple[int, ...]) -> float:
        sums = [
            {name: sum(d[name] for d, p in zip(documents, places, strict=True) if p == j) for name in costs.features}
            for j in range(3)
        ]
        return assign(costs.problem(TEMPLATE, sums), 1).slowest_ms

    all_of_them = (places for places in product(range(3), repeat=6) if list(dict.fromkeys(places)) == [0, 1, 2])
    assert packed(costs, documents, 3, 1e9).assignment.slowest_ms <= 1.05 * min(map(slowest_ms, all_of_them))


def test_what_is_full_to_the_brim_is_packed_by_size(costs: CostModel) -> None:
    documents = [{"tokens": float(t), "squares": 0.0} for t in (5, 5, 4, 4, 3, 3)]
    packing = packed(costs, documents, 3, 8)
    assert {sum(documents[i]["tokens"] for i in each) for each in packing.documents} == {8}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"microbatches": 25}, "microbatches = 25: from 1 to the 24 documents"),
        ({"limits": {"images": 3}}, r"limits\.images: expected one of the features tokens, squares"),
        ({"limits": {"tokens": 0}}, r"limits\.tokens = 0: a number above 0"),
        ({"limits": {"tokens": 10}}, r"documents\[0\]\.tokens = \d+: a micro-batch may have 10"),
        ({"microbatches": 1, "limits": {"tokens": 8192}}, "microbatches = 1: no way is known to put 24 documents"),
    ],
)
def test_documents_that_do_not_fit_are_refused(costs: CostModel, arguments: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {"microbatches": 4, "limits": {"tokens": 1e9}} | arguments
    with pytest.raises(InputError, match=complaint):
        pack(documents_of(24, 5), problem=partial(costs.problem, TEMPLATE), costs=costs, **given)
