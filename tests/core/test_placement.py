"""A placement loses no work and no bytes, and goes with its schedule through wire, file, cache and command line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import AMPLE, stages
from typer import Exit

from optpipe import Device, InputError, Problem, Schedule, ScheduleFile, Stage, check
from optpipe.anytime import Result, _with_incumbent
from optpipe.model.placement import Placement, _even_cuts, rechunk
from optpipe.model.records import StageCosts
from optpipe.process.protocol import Incumbent, Programs, Request
from optpipe_cache import Cache
from optpipe_solver.heuristics import generate

TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms", "recompute_ms")


@st.composite
def piped(draw: Any, layered: bool | None = None) -> Problem:
    """One route over any devices; with or without layers, as many as four chunks could be made of."""
    devices = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    layered = draw(st.booleans()) if layered is None else layered
    return Problem(
        microbatches=2,
        devices=[Device(activation_budget_bytes=AMPLE)] * 3,
        stages=[draw(stages(d)) for d in devices],
        layers=[_layer(draw(stages(0))) for _ in range(draw(st.integers(12, 16)))] if layered else None,
    )


def _layer(stage: Stage) -> StageCosts:
    return StageCosts(
        **{name: value for name, value in stage.model_dump(exclude_none=True).items() if name != "device"}
    )


def layer(ms: float, size: int = 1, **more: Any) -> StageCosts:
    times = {"forward_ms": ms, "backward_input_ms": ms, "backward_weight_ms": ms}
    return StageCosts(**times, activation_bytes=size, saved_for_weight_bytes=size, **more)


def plain(devices: int = 4, microbatches: int = 4, layers: list[StageCosts] | None = None, **changes: Any) -> Problem:
    costs = {
        "forward_ms": 4.0,
        "backward_input_ms": 6.0,
        "backward_weight_ms": 2.0,
        "activation_bytes": 10,
        "saved_for_weight_bytes": 6,
    }
    costs |= {
        "offload_ms": 3.0,
        "reload_ms": 5.0,
        "offload_bytes": 8,
        "offload_parts": 2,
        "recompute_ms": 4.0,
        "checkpoint_bytes": 3,
    }
    given = [Stage(device=d, **costs) for d in range(devices)]
    return Problem(
        microbatches=microbatches,
        devices=[Device(activation_budget_bytes=100)] * devices,
        stages=given,
        layers=layers,
        **changes,
    )


def held(problem: Problem, device: int, field: str) -> float:
    return sum(getattr(problem.stages[s], field) or 0 for s in problem.stages_on(device))


@settings(deadline=None)
@given(piped(layered=False), st.integers(1, 4), st.sampled_from(["looped", "v"]))
def test_chunks_lose_no_work_and_no_bytes(problem, chunks, shape):
    placed = rechunk(problem, chunks, shape)
    assert len(placed.stages) == chunks * len({stage.device for stage in problem.stages})
    for d in range(len(problem.devices)):
        for field in TIMES:
            assert held(placed, d, field) == pytest.approx(held(problem, d, field))
        for field in ("activation_bytes", "saved_for_weight_bytes", "offload_bytes"):
            assert held(placed, d, field) >= held(problem, d, field)
        stays = held(placed, d, "activation_bytes") - held(placed, d, "offload_bytes")
        assert stays >= held(problem, d, "activation_bytes") - held(problem, d, "offload_bytes")
        assert held(placed, d, "activation_bytes") - held(problem, d, "activation_bytes") < 2 * chunks
        again = [problem.stages[s] for s in problem.stages_on(d)]
        if all(stage.can_recompute for stage in again):
            assert held(placed, d, "checkpoint_bytes") >= held(problem, d, "checkpoint_bytes")
    if chunks != 3:  # a third is no binary fraction
        assert rechunk(placed, chunks, shape).stages == placed.stages


@settings(deadline=None)
@given(piped(layered=True), st.integers(1, 4), st.sampled_from(["looped", "v"]))
def test_stages_of_layers_cost_what_their_layers_cost(problem, chunks, shape):
    placement = Placement.balanced(problem, chunks, shape)
    placed = placement.apply(problem)
    at = 0
    for stage, count in zip(placed.stages, placement.layers, strict=True):
        own = problem.layers[at : at + count]
        at += count
        assert stage.forward_ms == pytest.approx(sum(layer.forward_ms for layer in own))
        assert stage.activation_bytes == sum(layer.activation_bytes for layer in own)
        assert (stage.offload_bytes or 0) == sum(layer.offload_bytes or 0 for layer in own)
        if stage.can_recompute:
            stays = (layer.checkpoint_bytes if layer.can_recompute else layer.activation_bytes for layer in own)
            assert stage.checkpoint_bytes == sum(stays)
    assert at == len(problem.layers)


def test_one_chunk_of_a_pipeline_with_one_chunk_is_that_pipeline():
    problem = plain()
    assert rechunk(problem, 1) is problem
    assert rechunk(problem, 1, "v") is problem


def test_chunks_pass_the_devices_again_or_back():
    backwards = plain().replace(routes=[[3, 2, 1, 0]])
    assert [stage.device for stage in rechunk(backwards, 2).stages] == [3, 2, 1, 0, 3, 2, 1, 0]
    assert [stage.device for stage in rechunk(plain(), 3, "v").stages] == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    chunk = rechunk(plain(), 2).stages[5]
    assert (chunk.device, chunk.forward_ms, chunk.activation_bytes, chunk.offload_bytes, chunk.offload_parts) == (
        1,
        2.0,
        5,
        4,
        2,
    )
    assert chunk.checkpoint_bytes == 3  # what goes into a chunk is as large as what goes into the whole


@settings(deadline=None)
@given(piped())
def test_two_ways_pass_the_devices_of_a_row_there_and_back(problem):
    row, placed = rechunk(problem, 1), rechunk(problem, 1, "bidirectional")
    p = len(row.stages)
    placement = Placement.balanced(problem, 1, "bidirectional")
    assert placed.all_routes == (tuple(range(p)), tuple(range(p, 2 * p)))
    assert placed.microbatch_routes == (0, 1)
    assert [stage.device for stage in placed.stages] == [
        d for way in (1, -1) for d in [s.device for s in row.stages][::way]
    ]
    there, back = placed.stages[:p], placed.stages[p:]
    assert [s.model_copy(update={"device": 0}) for s in there] == [s.model_copy(update={"device": 0}) for s in back]
    if problem.layers is None:
        assert there == row.stages
    else:
        assert sum(placement.layers) == len(problem.layers)
        assert len(placement.layers) == p


def test_two_ways_give_heavy_layers_to_devices_that_both_have_room():
    problem = plain(devices=3, layers=[layer(1.0, 30)] * 6).replace(
        devices=[{"activation_budget_bytes": size} for size in (90, 200, 60)]
    )
    assert Placement.balanced(problem, 1).layers == (2, 2, 2)
    assert Placement.balanced(
        problem.replace(devices=[{"activation_budget_bytes": size} for size in (90, 200, 30)]), 1
    ).layers == (2, 3, 1)
    two_ways = Placement.balanced(
        problem.replace(devices=[{"activation_budget_bytes": size} for size in (90, 200, 30)]), 1, "bidirectional"
    )
    assert two_ways.layers == (1, 4, 1)  # what the first device has room for, the last one must have, too


def test_two_ways_of_several_chunks_are_refused():
    with pytest.raises(
        InputError,
        match=r"^placement: chunks = 2: a bidirectional placement has chunks = 1, one stage a device each way$",
    ):
        rechunk(plain(), 2, "bidirectional")
    with pytest.raises(InputError, match=r"^placement: chunks = 0: "):
        rechunk(plain(), 0)
    placed = replace(two_way(), placement=None)
    document = ScheduleFile.of(placed).model_dump(mode="json", exclude_none=True) | {
        "placement": {"chunks": 3, "shape": "bidirectional"}
    }
    with pytest.raises(InputError, match=r"^schedule: placement: chunks = 3: a bidirectional placement has chunks = 1"):
        ScheduleFile.from_json(json.dumps(document))


def two_way() -> Schedule:
    """Micro-batches one after the other over both routes."""
    placement = Placement(chunks=1, shape="bidirectional")
    problem = placement.apply(plain())
    programs: list[list[str]] = [[] for _ in problem.devices]
    for j in range(problem.microbatches):
        for kind, way in (("F", problem.route(j)), ("BW", problem.route(j)[::-1])):
            for s in way:
                programs[problem.stages[s].device].append(f"{s}{kind}{j}")
    return Schedule.parse(problem, programs, method="two ways", placement=placement)


def test_two_ways_go_over_the_wire_and_through_files(tmp_path, capsys):
    from optpipe_cli.inspect import check as inspect

    schedule = two_way()
    assert check(schedule.problem, schedule) == []
    assert (
        schedule.makespan_ms == (16 + 8) + 3 * (4 * 8 + 4) + 24
    )  # each begins where the one before has turned, and follows it
    sent = Programs.model_validate_json(Programs.of(schedule).model_dump_json(exclude_none=True))
    received = sent.schedule(plain(), schedule.method)
    assert (received.problem, received.placement) == (schedule.problem, schedule.placement)
    schedule.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == schedule
    plain().save(tmp_path / "asked.json")
    inspect(tmp_path / "asked.json", tmp_path / "s.json")
    assert "valid: " in capsys.readouterr().out


def test_two_chunks_become_one_again():
    problem = plain()
    assert rechunk(rechunk(problem, 2, "v"), 1).stages == tuple(
        s.model_copy(update={"checkpoint_bytes": 6}) for s in problem.stages
    )


def test_what_can_leave_leaves_and_the_rest_stays():
    leaves = {"offload_ms": 1.0, "reload_ms": 2.0, "offload_bytes": 3}
    layers = [
        layer(1.0, 4, **leaves, offload_parts=4),
        layer(1.0, 5),
        layer(1.0, 4, **leaves, offload_parts=2),
        layer(1.0),
    ]
    problem = plain(devices=2, layers=layers)
    first, last = Placement(chunks=1, layers=(3, 1)).apply(problem).stages
    assert (first.activation_bytes, first.offload_bytes, first.offload_ms, first.reload_ms, first.offload_parts) == (
        13,
        6,
        2.0,
        4.0,
        2,
    )
    assert not last.can_offload


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=9), st.integers(1, 3), st.sampled_from([4, 9, 30]))
def test_the_heaviest_stage_is_as_light_as_any_partition_within_memory_has_it(sizes, stages, memory):
    layers = [layer(float(size), size) for size in sizes]
    found = _even_cuts(layers, [memory] * stages)

    def loads(counts: tuple[int, ...]) -> list[int]:
        ends = [sum(counts[:k]) for k in range(len(counts) + 1)]
        return [sum(sizes[a:b]) for a, b in pairwise(ends)]

    all_of_them = [
        tuple(b - a for a, b in pairwise((0, *cuts, len(sizes))))
        for cuts in combinations(range(1, len(sizes)), stages - 1)
    ]
    best = min((max(loads(counts)), sum(load**2 for load in loads(counts))) for counts in all_of_them)
    assert len(found) == stages
    assert sum(found) == len(sizes)
    if best[0] <= memory:
        assert (max(loads(found)), sum(load**2 for load in loads(found))) == best


def test_behind_a_heavy_head_the_others_stay_even():
    layers = [layer(1.0)] * 9 + [layer(20.0)]
    assert Placement.balanced(plain(layers=layers), 1).layers == (3, 3, 3, 1)


@pytest.mark.parametrize(
    ("problem", "placement", "sentence"),
    [
        (plain(), Placement(chunks=1, layers=(1, 1, 1, 1)), "placement.layers: the problem has none"),
        (
            plain(layers=[layer(1.0)] * 5),
            Placement(chunks=1),
            "placement.layers is missing: the problem has 5 layers, each of 4 stages",
        ),
        (
            plain(layers=[layer(1.0)] * 5),
            Placement(chunks=1, layers=(5,)),
            "placement.layers has 1 entries: 1 chunks a device make 4",
        ),
        (
            plain(layers=[layer(1.0)] * 5),
            Placement(chunks=1, layers=(1, 1, 1, 1)),
            "placement.layers add up to 4: the problem has 5",
        ),
        (
            plain(routes=[[0, 1, 2, 3], [3, 2, 1, 0]], microbatch_routes=[0, 0, 1, 1]),
            Placement(chunks=2),
            "routes: there are 2, a placement is for one route only",
        ),
    ],
)
def test_a_placement_of_another_problem_is_one_sentence(problem, placement, sentence):
    with pytest.raises(InputError, match=sentence):
        placement.apply(problem)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="chunks = 2: 8 stages cannot be made of 5 layers"):
        rechunk(plain(layers=[layer(1.0)] * 5), 2)


def test_it_is_said_in_words():
    texts = [str(Placement(chunks=1)), str(Placement(chunks=2, shape="v")), str(Placement(chunks=2, layers=(3, 4)))]
    assert texts == ["1 chunk a device", "2 chunks a device, V-shaped", "2 chunks a device, looped, layers 3 4"]
    assert str(Placement(chunks=1, shape="bidirectional")) == "1 chunk a device, bidirectional"


@pytest.fixture
def placed() -> Schedule:
    placement = Placement(chunks=2, shape="v")
    return replace(generate("zb-auto", placement.apply(plain())), placement=placement)


def test_on_the_wire_it_is_the_receiver_who_places_its_problem(placed):
    sent = Programs.model_validate_json(Programs.of(placed).model_dump_json(exclude_none=True))
    received = sent.schedule(plain(), placed.method)
    assert (received.problem, received.placement) == (placed.problem, placed.placement)
    assert received.makespan_ms == placed.makespan_ms
    slower = plain().replace(p2p_ms=1.0)
    assert sent.schedule(slower, "").problem == rechunk(slower, 2, "v")


def test_a_solver_that_was_to_keep_the_stages_is_not_believed_others(placed):
    frame = Incumbent(method="liar", schedule=Programs.of(placed))
    kept = _with_incumbent(Result("unknown"), frame, Request(problem=plain()))
    assert kept.schedule is None
    assert kept.notes == ("a schedule of liar was rejected: 2 chunks a device, V-shaped: the stages were to be kept",)
    free = _with_incumbent(Result("unknown"), frame, Request(problem=plain(), placements="all"))
    assert free.makespan_ms == placed.makespan_ms


def test_a_file_and_a_cache_keep_a_placed_schedule(placed, tmp_path):
    placed.save(tmp_path / "s.json")
    loaded = Schedule.load(tmp_path / "s.json")
    assert (loaded.problem, loaded.placement, loaded.makespan_ms) == (
        placed.problem,
        placed.placement,
        placed.makespan_ms,
    )
    cache = Cache(tmp_path / "cache.db")
    cache.add(placed, "feasible")
    hit = cache.lookup(placed.problem)
    assert hit.schedule.problem == placed.problem
    assert hit.schedule.placement is None  # of the problem it was looked up for it is no other placement
    assert cache.lookup(plain()) is None


def test_check_wants_the_problem_that_was_asked_about_or_the_one_in_the_file(placed, tmp_path, capsys):
    from optpipe_cli.inspect import check, simulate

    placed.save(tmp_path / "s.json")
    plain().save(tmp_path / "asked.json")
    placed.problem.save(tmp_path / "placed.json")
    plain().replace(p2p_ms=1.0).save(tmp_path / "slower.json")
    plain().replace(microbatches=5).save(tmp_path / "longer.json")
    for name in ("asked.json", "placed.json"):
        check(tmp_path / name, tmp_path / "s.json")
        assert "valid: " in capsys.readouterr().out
    for name, difference in (
        ("slower.json", "p2p_ms = 1.0, in the file 0.0"),
        ("longer.json", "microbatches = 5, in the file 4"),
    ):
        with pytest.raises(Exit):
            check(tmp_path / name, tmp_path / "s.json")
        told = capsys.readouterr().out.splitlines()[0]
        assert told.startswith(
            "placement = 2 chunks a device, V-shaped: does not make the problem in the file of this one: "
        )
        assert told.endswith(difference)
    simulate(tmp_path / "slower.json", tmp_path / "s.json")
    assert "makespan" in capsys.readouterr().out


def test_a_lie_about_the_placed_problem_is_found(placed, tmp_path, capsys):
    from optpipe_cli.inspect import check

    stages = [stage.model_dump(exclude_none=True) for stage in placed.problem.stages]
    stages[2]["forward_ms"] = 0.5
    ScheduleFile.of(replace(placed, problem=placed.problem.replace(stages=stages))).save(tmp_path / "s.json")
    plain().save(tmp_path / "asked.json")
    with pytest.raises(Exit):
        check(tmp_path / "asked.json", tmp_path / "s.json")
    assert "stages[2].forward_ms = 2.0, in the file 0.5" in capsys.readouterr().out
