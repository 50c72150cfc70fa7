"""A schedule for every step, what a `CostModel` learns of micro-batches, and documents packed into micro-batches by it
(`optpipe.steps`)."""

import json
import os
import sys
import threading
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.oracles.enumeration import best_of_all
from support.problems import pipeline, stage

from optpipe import InputError, Problem, certify, check
from optpipe.model.records import COMPUTE_MS
from optpipe.steps import CostModel, Packing, StepMemoryError, StepRules, StepScheduler, assign, pack


def step_of(devices: int, weights: list[float], memory: int) -> Problem:
    """A step whose micro-batches cost their weight times (2, 2, 1) ms and 100 bytes on each device."""
    one = stage((2, 2, 1), (100, 40))
    each = {name: tuple(type(value)(value * weight) for weight in weights) for name, value in one.items()}
    return pipeline(devices, len(weights), memory, each, p2p_ms=0.5)


def random_step(devices: int, microbatches: int, seed: int = 0, memory: float = 2.0) -> Problem:
    weights = np.random.default_rng(seed).lognormal(0.0, 0.4, microbatches)
    return step_of(devices, weights.tolist(), int(memory * 100 * weights.max()))


@pytest.mark.parametrize("weights", [[1, 3], [3, 1], [2, 2], [1, 7]])
@pytest.mark.parametrize("memory", [400, 1200])
def test_a_first_schedule_is_as_short_as_any_of_a_tiny_step(weights: list[float], memory: int) -> None:
    problem = step_of(2, weights, memory) if max(weights) * 100 <= memory else step_of(2, weights, max(weights) * 100)
    planned = StepScheduler(problem).plan(problem, improve=False)
    assert planned.first.makespan_ms == pytest.approx(best_of_all(problem, "makespan")[0], rel=1e-9)


@pytest.mark.parametrize("memory", [1.0, 1.3, 4.0])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 5), (4, 8)])
def test_schedules_are_valid_and_only_become_shorter(devices: int, microbatches: int, memory: float) -> None:
    problem = random_step(devices, microbatches, 1, memory)
    planned = StepScheduler(problem).plan(problem)
    best = planned.best()
    assert best.makespan_ms <= planned.first.makespan_ms
    for schedule in (planned.first, best):
        assert not check(problem, schedule)
        assert certify(problem, schedule).fits
    assert planned.best() is best


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's elsewhere")
def test_a_search_beside_the_training_is_nicer_than_it() -> None:
    before = set(threading.enumerate())
    planned = StepScheduler(random_step(8, 32)).plan(random_step(8, 32))
    (thread,) = set(threading.enumerate()) - before
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    while thread.is_alive() and os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == mine:
        pass
    assert thread.is_alive()
    planned.best()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


@pytest.mark.parametrize(("memory", "seed"), [(1.6, 9), (2.0, 3), (2.0, 8)])
def test_a_step_starts_from_the_rules_of_another(memory: float, seed: int) -> None:
    """By what micro-batches weigh, whatever their numbers are: one with the same ones has no longer schedule."""
    before = random_step(4, 8, seed, memory)
    planned = StepScheduler(before).plan(before, improve=False)
    planned._search(20_000)
    best = planned.best()
    assert best.rules is not None
    start = StepRules(best.rules, before)
    same = before.entering(np.random.default_rng(1).permutation(8).tolist())
    alone, started = (StepScheduler(same).plan(same, False, starts).first.makespan_ms for starts in ((), (start,)))
    assert started <= best.makespan_ms * (1 + 1e-9) < alone
    for other in (random_step(4, microbatches, 3, memory) for microbatches in (1, 5, 13)):
        assert not check(other, StepScheduler(other).plan(other, False, [start]).first)
    assert StepScheduler(same).plan(same, False, [StepRules(start.rules, random_step(4, 5))]).first, "rules of no step"


@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_a_step_has_any_number_of_micro_batches_and_one_first_schedule_on_all_ranks(microbatches: int) -> None:
    step = random_step(2, microbatches)
    first, again = (StepScheduler(random_step(2, 4)).plan(step, improve=False).first for _ in range(2))
    assert not check(step, first)
    assert first.programs == again.programs


@pytest.mark.parametrize(
    "relief", [{"recompute": (2, 10)}, {"offload": (1, 1, 90)}, {"offload": (1, 1, 90), "offload_parts": 2}]
)
def test_what_fits_only_if_activations_leave_is_scheduled(relief: dict[str, Any]) -> None:
    chunks = [stage((2, 2, 1), (100, 40), device=d, **relief) for d in (0, 1, 0, 1)]
    problem = pipeline(2, 3, 150, chunks)
    problem = problem.replace(stages=[s.model_copy(update={"forward_ms": (2.0, 3.0, 1.0)}) for s in problem.stages])
    assert not check(problem, StepScheduler(problem).plan(problem, improve=False).first)
    assert sorted(map(len, assign(problem, 2, [2, 1]).microbatches)) == [1, 2]


@pytest.mark.parametrize("first_stage", [0, 1])
def test_a_micro_batch_without_room_is_named_before_the_step(first_stage: int) -> None:
    devices = [first_stage, 1 - first_stage, first_stage]
    chunks = [stage((2, 2, 1), (0, 0), device=d) | {"activation_bytes": (100, 260, 90)} for d in devices]
    problem = pipeline(2, 3, 500, chunks)
    scheduler = StepScheduler(problem)
    with pytest.raises(StepMemoryError, match="micro-batch 1 by itself needs at least 520 B") as error:
        scheduler.plan(problem)
    assert (error.value.microbatch, error.value.device) == (1, first_stage)


@pytest.mark.parametrize("weights", [[1, 9, 2, 3, 5], [4, 4, 4, 1, 1], [1, 2, 3, 4, 8]])
@pytest.mark.parametrize("counts", [[3, 2], [2, 3]])
def test_no_other_assignment_of_a_tiny_batch_is_faster_by_much(weights: list[float], counts: list[int]) -> None:
    batch = step_of(2, weights, 2000)
    scheduler, assignment = StepScheduler(batch), assign(batch, 2, counts)

    def slowest_ms(first: frozenset[int]) -> float:
        """Of the replica that has these micro-batches, and the one that has the others."""
        steps = [batch.entering(sorted(each)) for each in (first, set(range(5)) - first)]
        return max(scheduler.plan(step, improve=False).first.makespan_ms for step in steps)

    assert [len(each) for each in assignment.microbatches] == counts
    assert sorted(sum(assignment.microbatches, ())) == list(range(5))
    shortest = min(slowest_ms(frozenset(first)) for first in combinations(range(5), counts[0]))
    assert slowest_ms(frozenset(assignment.microbatches[0])) <= 1.03 * shortest


@pytest.mark.parametrize("memory", [1.0, 4.0])
@pytest.mark.parametrize("free", [False, True])
def test_replicas_end_close_to_the_mean_work(free: bool, memory: float) -> None:
    batch = random_step(2, 32, 3, memory)
    assignment = assign(batch, 4, free=free)
    assert sorted(sum(assignment.microbatches, ())) == list(range(32))
    assert all(assignment.microbatches)
    assert free or {len(each) for each in assignment.microbatches} == {8}
    assert assignment.floor_ms <= assignment.slowest_ms <= (1.1 if memory > 1 else 2.2) * assignment.floor_ms
    for microbatches, ms in zip(assignment.microbatches, assignment.ms, strict=True):
        step = batch.entering(microbatches)
        assert StepScheduler(step).plan(step, improve=False).first.makespan_ms <= ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"replicas": 5}, "replicas = 5: 8 micro-batches cannot be divided equally"),
        ({"replicas": 9}, "replicas = 9: from 1 to the 8"),
        ({"replicas": 2, "counts": [4, 5]}, "sum 8"),
        ({"replicas": 2, "counts": [8, 0]}, "at least 1"),
    ],
)
def test_numbers_of_replicas_and_stages_that_do_not_match_are_refused(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        assign(random_step(2, 8), **arguments)
    with pytest.raises(InputError, match="same devices"):
        StepScheduler(random_step(2, 4)).plan(random_step(3, 4))


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


def test_bytes_that_leave_are_no_more_than_those_predicted() -> None:
    """115.5 bytes, of which as many leave: half a byte can neither be kept nor sent."""
    model = CostModel(("tokens",), 1, ("activation_bytes", "offload_bytes"))
    model.learn([{"tokens": 10}, {"tokens": 20}] * 3, [dict.fromkeys(model.figures, [105, 210] * 3)])
    one = pipeline(1, 1, 2**40, stage(offload=(1, 1, 1)))
    [one_stage] = model.problem(one, [{"tokens": 11}]).stages
    assert (one_stage.activation_bytes, one_stage.offload_bytes) == ((116,), (115,))


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
