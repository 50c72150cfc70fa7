"""Documents into micro-batches (`optpipe.steps.pack`)."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.problems import pipeline, stage

from optpipe import InputError, Problem
from optpipe.steps import CostModel, assign, pack

FIGURES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "activation_bytes")


def lengths(n: int, seed: int) -> list[dict[str, float]]:
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.0, n).clip(16, 8192).astype(int)
    return [{"tokens": float(length), "squares": float(length) ** 2} for length in drawn.tolist()]


def template(devices: int = 2) -> Problem:
    return pipeline(devices, 4, 2**40, stage())


def learnt(devices: int = 2) -> CostModel:
    costs = CostModel(("tokens", "squares"), devices, FIGURES)
    documents = lengths(64, 0)
    ms = [1.0 + 2e-3 * each["tokens"] + 5e-7 * each["squares"] for each in documents]
    figures = {name: ms if name.endswith("_ms") else [100 * each["tokens"] for each in documents] for name in FIGURES}
    costs.learn(documents, [figures] * devices)
    return costs


@pytest.mark.parametrize(("microbatches", "replicas", "most"), [(4, 1, 16_384), (8, 2, 9_000), (3, 3, 1e9)])
def test_each_document_is_packed_once_within_limits(microbatches: int, replicas: int, most: float) -> None:
    documents = lengths(24, 5)
    packing = pack(documents, microbatches, {"tokens": most}, partial(learnt().problem, template()), learnt(), replicas)
    assert sorted(sum(packing.documents, ())) == list(range(24))
    assert all(0 < sum(documents[i]["tokens"] for i in each) <= most for each in packing.documents)
    assert sorted(sum(packing.assignment.microbatches, ())) == list(range(microbatches))


@pytest.mark.parametrize("seed", range(2))
def test_no_other_packing_of_a_few_documents_is_faster_by_much(seed: int) -> None:
    documents, costs = lengths(6, seed), learnt()
    packing = pack(documents, 3, {"tokens": 1e9}, partial(costs.problem, template()), costs)

    def slowest_ms(places: tuple[int, ...]) -> float:
        sums = [
            {name: sum(d[name] for d, p in zip(documents, places, strict=True) if p == j) for name in costs.features}
            for j in range(3)
        ]
        return assign(costs.problem(template(), sums), 1).slowest_ms

    shortest = min(
        slowest_ms(places) for places in product(range(3), repeat=6) if list(dict.fromkeys(places)) == [0, 1, 2]
    )
    assert packing.assignment.slowest_ms <= 1.05 * shortest


def test_what_is_full_to_the_brim_is_packed_by_size() -> None:
    documents = [{"tokens": float(t), "squares": 0.0} for t in (5, 5, 4, 4, 3, 3)]
    packing = pack(documents, 3, {"tokens": 8}, partial(learnt().problem, template()), learnt())
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
def test_documents_that_do_not_fit_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {"microbatches": 4, "limits": {"tokens": 1e9}} | arguments
    with pytest.raises(InputError, match=complaint):
        pack(lengths(24, 5), problem=partial(learnt().problem, template()), costs=learnt(), **given)
