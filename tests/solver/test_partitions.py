"""Partitions of layers: recognised, made better, and bounded by what holds for every one of them; and the stages given,
which must be what the layers make."""

from collections.abc import Iterator
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.frames import notes
from support.oracles.enumeration import best_of_all, stage
from support.problems.strategies import AMPLE, differing, factors, schedules, stages, times

import optpipe
from optpipe import InputError, Problem, Schedule, certify
from optpipe.errors import ScheduleError
from optpipe.model.placement import Placement
from optpipe.model.records import EXCHANGE
from optpipe.process.protocol import Frame, Request
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.bounds.any_partition import no_partition_fits, partition_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.portfolio import PlacementSearch
from optpipe_solver.portfolio.partitions import PartitionDescent, mismatch, partition_of_stages


def costs(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "device" and value is not None}


def model(
    layers: list[dict[str, Any]], memory: list[int], microbatches: int, p2p_ms: float = 1.0, **fields: Any
) -> Problem:
    """The layers over as many devices as there are sizes of memory, all but one a stage of their own in the problem's
    own partition."""
    each = [costs(layer) for layer in layers]
    problem = problems.pipeline(len(memory), microbatches, memory, each[0], p2p_ms=p2p_ms, layers=each, **fields)
    counts = (*[1] * (len(memory) - 1), len(layers) - len(memory) + 1)
    return Placement(chunks=1, layers=counts).apply(problem)


def partitions(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), stages - 1)
    ]


@st.composite
def layered(draw: Any) -> Problem:
    count = draw(st.integers(1, 3))
    alike = draw(st.sampled_from([None, 1, 2]))
    layers = []
    for _ in range(draw(st.integers(count, 7))):
        layer = draw(stages(0)).model_dump(exclude_none=True)
        if alike and "offload_ms" in layer:
            layer["offload_parts"] = alike
        layers.append(layer)
    m = draw(st.integers(1, 3))
    if draw(st.booleans()):
        as_stages = Problem(microbatches=m, devices=[{"activation_budget_bytes": AMPLE}], stages=layers)
        layers = [layer.model_dump(exclude_none=True) for layer in draw(differing(as_stages)).stages]
    mode, factor = (
        draw(st.sampled_from(["half_duplex", "full_duplex"])),
        draw(st.sampled_from([None, 0.75, "by stages"])),
    )
    if factor != "by stages":
        return model(layers, [AMPLE] * count, m, draw(times), transfer_mode=mode, overlap_factor=factor)
    layers = [each | {share: draw(st.sampled_from([0.0, 0.5, 1.0])) for share in EXCHANGE} for each in layers]
    problem = model(layers, [AMPLE] * count, m, draw(times), transfer_mode=mode)
    return problem.replace(overlap_factor=draw(factors(len(problem.stages))))


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_schedule_of_any_partition_is_shorter(data):
    problem = data.draw(layered())
    chunks = data.draw(st.integers(1, len(problem.layers) // len(problem.devices)))
    shape = data.draw(st.sampled_from(["looped", "v"]))
    counts = data.draw(st.sampled_from(partitions(len(problem.layers), chunks * len(problem.devices))))
    placement = Placement(chunks=chunks, shape=shape, layers=counts)
    schedule = data.draw(schedules(placement.apply(problem)))
    tight = problems.with_budgets(problem, [peak.bytes for peak in certify(schedule.problem, schedule).device])
    assert no_partition_fits(tight) is None
    assert partition_bound(tight, "makespan") <= schedule.makespan_ms + 1e-6
    assert partition_bound(tight, "span") <= schedule.span_ms + 1e-6


TINY = {
    "memory for one": ([stage(0, (1, 1, 1), 1), stage(0, (2, 1, 1), 1, 1), stage(0, (1, 2, 1), 1)], [2, 2], 2),
    "a heavy head": (
        [stage(0, (1, 1, 0), 1), stage(0, (1, 1, 0), 1), stage(0, (1, 1, 1), 1), stage(0, (4, 4, 3), 1)],
        [3, 2],
        2,
    ),
    "offload": ([stage(0, (1, 1, 1), 2, 1, (1, 1, 2)), stage(0, (2, 1, 1), 1), stage(0, (1, 2, 1), 1)], [3, 2], 2),
    "two chunks": ([stage(0, (1, 2, 1), 1, 1)] * 3 + [stage(0, (2, 2, 2), 2)], [5, 5], 1),
    "micro-batches that differ": (
        [stage(0, (1, 1, 1), 1) | {"forward_ms": [1.0, 3.0], "backward_input_ms": [2.0, 1.0]}] * 2
        + [stage(0, (1, 2, 1), 2) | {"backward_weight_ms": [0.0, 4.0], "activation_bytes": [1, 2]}],
        [4, 3],
        2,
    ),
}


@pytest.mark.parametrize(("name", "objective"), [*((name, "makespan") for name in TINY), ("a heavy head", "span")])
def test_the_best_of_all_schedules_of_all_partitions_is_no_shorter(name, objective):
    layers, memory, microbatches = TINY[name]
    problem = model(layers, memory, microbatches)
    best = float("inf")
    for chunks in (1, 2) if microbatches == 1 else (1,):
        for counts in partitions(len(layers), 2 * chunks):
            for shape in ("looped", "v")[:chunks]:
                best = min(
                    best, best_of_all(Placement(chunks=chunks, shape=shape, layers=counts).apply(problem), objective)[0]
                )
    assert 0.5 * best < partition_bound(problem, objective) <= best + 1e-9


def test_all_micro_batches_pass_a_heavy_layer_after_the_layers_before_it() -> None:
    layers = [*[stage(0, (1, 1, 0), 1)] * 3, stage(0, (8, 8, 8), 1)]
    assert partition_bound(model(layers, [100, 100], 4, 0.0)) == 3 + 4 * 24


def test_bytes_over_time_bound_all_partitions():
    """Room for one activation of a layer at a time, which is held for four of its passes by the last layer and for more
    by the first."""
    layers = [stage(0, (1, 1, 0), 1)] * 4
    ample, short = model(layers, [100, 100], 8, 0.0), model(layers, [2, 2], 8, 0.0)
    assert partition_bound(ample) == (8 * 8 + 1 + 1) / 2
    assert partition_bound(short) == (8 * (8 + 6 + 4 + 2) / 2 + 1) / 2
    for more in ({"away": (1, 1, 1)}, {"again": (1, 0)}):  # what can leave is held during its ops alone
        leaving = model([stage(0, (1, 1, 0), 1, **more)] * 4, [2, 2], 8, 0.0)
        assert partition_bound(leaving) == partition_bound(ample)


@settings(max_examples=examples(100), deadline=None)
@given(layered(), st.integers(0, 25))
def test_where_nothing_can_fit_no_partition_does(problem, memory):
    tight = problems.with_budgets(problem, memory)
    assert no_partition_fits(tight) is None or all(
        infeasibility(Placement(chunks=chunks, shape=shape, layers=counts).apply(tight))
        for chunks in range(1, len(tight.layers) // len(tight.devices) + 1)
        for shape in ("looped", "v")
        for counts in partitions(len(tight.layers), chunks * len(tight.devices))
    )


def test_why_nothing_can_fit():
    layers = [stage(0, (1, 1, 1), 3), stage(0, (1, 1, 1), 5)]
    assert no_partition_fits(model(layers, [4, 4], 2)) == "layers[1] needs 5 B and no device has more than 4 B"
    told = "one micro-batch leaves at least 15 B on the devices, and all of them together have 12 B"
    assert no_partition_fits(model([stage(0, (1, 1, 1), 3)] * 5, [6, 6], 2)) == told


@settings(max_examples=examples(50), deadline=None)
@given(layered(), st.sampled_from([1, 2]), st.sampled_from(["looped", "v"]), st.data())
def test_the_given_partition_is_recognised(problem, chunks, shape, data):
    """Not always the same one: a layer that costs nothing may stand on either side of a border."""
    devices = len(problem.devices)
    if chunks * devices > len(problem.layers):
        return
    counts = data.draw(st.sampled_from(partitions(len(problem.layers), chunks * devices)))
    placed = Placement(chunks=chunks, shape=shape, layers=counts).apply(problem)
    found = partition_of_stages(placed)
    nothing = any(
        not (layer.forward_ms or layer.backward_input_ms or layer.activation_bytes) for layer in problem.layers
    )
    assert nothing or (found is not None and found.apply(placed).stages == placed.stages)


def test_stages_that_are_no_layers_are_not_recognised():
    problem = model([stage(0, (2, 2, 2), 2)] * 4, [9, 9], 2)
    assert partition_of_stages(problem) == Placement(chunks=1, layers=(1, 3))
    apart = [s.model_copy(update={"forward_ms": s.forward_ms + 1.0}) for s in problem.stages]
    assert partition_of_stages(problem.replace(stages=apart)) is None
    uneven = [
        problem.stages[0],
        problem.stages[1].model_copy(update={"device": 0}),
        problem.stages[1].model_copy(update={"device": 1}),
    ]
    assert partition_of_stages(problem.replace(stages=uneven)) is None


@pytest.mark.parametrize("memory", [1000, 9])
def test_the_descent_finds_better_partitions_that_fit(memory):
    layers = [stage(0, (1, 1, 1), 1)] * 12 + [stage(0, (6, 6, 6), 2)]
    problem = model(layers, [memory] * 3, 8, 0.0)
    descent = PartitionDescent(problem, "makespan", Placement(chunks=1, layers=(9, 3, 1)))
    seen = [(descent.length_ms, descent.placement) for _ in islice(descent.steps, 60)]
    lengths = [length for length, _ in seen]
    assert lengths == sorted(lengths, reverse=True)
    placed = descent.placement.apply(problem)
    assert infeasibility(placed) is None
    assert trivial_bound(placed) <= descent.length_ms < 0.9 * lengths[0]
    assert sum(descent.placement.layers) == 13


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "problems").glob("*.json"))
LAYER = problems.stage((1.25, 1.5, 1.0), (1001, 301))


def two_stages(**changes: Any) -> Problem:
    """Six layers in two stages of three; the first layer changed."""
    whole = {name: 3 * value for name, value in LAYER.items()}
    return problems.pipeline(2, 3, 9000, whole, layers=[LAYER | changes, *[LAYER] * 5])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_what_their_layers_make(path: Path) -> None:
    problem = Problem.load(path)
    assert problem.layers is None or mismatch(problem) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"backward_weight_ms": 0.0}, "layers: their backward_weight_ms add up to 5, those of the stages to 6; "),
        ({"activation_bytes": 2001}, "layers: their activation_bytes add up to 7006, those of the stages to 6006; "),
        (
            {"saved_for_weight_bytes": 101},
            "layers: their saved_for_weight_bytes add up to 1606, those of the stages to 1806; ",
        ),
        (
            {"forward_ms": [1.25, 0.1, 2.4]},
            "layers: their forward_ms of micro-batch 1 add up to 6.35, those of the stages to 7.5; ",
        ),
    ],
)
def test_layers_of_another_model_are_no_partition(changes: dict[str, Any], told: str) -> None:
    reason = mismatch(two_stages(**changes))
    assert reason
    assert reason.startswith(told)


def test_a_search_of_placements_says_so() -> None:
    with pytest.raises(InputError) as raised:
        optpipe.solve(two_stages(forward_ms=5.0), placements="all", time_limit_s=10.0)
    assert str(raised.value) == (
        "layers: their forward_ms add up to 11.25, those of the stages to 7.5; the stages given must be made of these "
        "layers, or kept (placements = keep)"
    )


def test_layers_count_only_where_placements_are_searched() -> None:
    others = {"forward_ms": 5.0, "backward_weight_ms": 0.0, "activation_bytes": 2001, "saved_for_weight_bytes": 101}
    assert optpipe.solve(two_stages(**others), time_limit_s=60.0, placements="keep").status == "optimal"


@pytest.mark.parametrize(
    "changes", [{}, {"forward_ms": 1.3}, {"forward_ms": [1.3, 1.25, 1.2]}, {"activation_bytes": 1003}]
)
def test_what_was_measured_apart_may_differ_a_little(changes: dict[str, Any]) -> None:
    assert mismatch(two_stages(**changes)) is None


def test_where_no_placement_has_a_schedule_the_reason_is_that_of_the_stages_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(problem: Problem, objective: str, deadline: float) -> Iterator[Schedule]:
        raise ScheduleError(f"{len(problem.stages)} stages")
        yield

    monkeypatch.setitem(STREAMS, "naive", broken)
    frames: list[Frame] = []
    PlacementSearch(
        Request(problem=two_stages(), placements="all", method="naive", time_limit_s=5.0), frames.append
    ).run()
    assert "2 chunks a device, looped, layers 1 1 2 2: naive gives no schedule: 4 stages" in notes(frames)
    assert notes(frames)[-1] == "naive gives no schedule: 2 stages"
