"""A placement loses no work and no bytes; frames, files, the cache and the command line keep it with its schedule."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import parsed, pipeline, stage
from support.problems.strategies import AMPLE, stages

from optpipe import Device, InputError, Problem, Schedule, ScheduleFile, check
from optpipe.anytime import Keeper
from optpipe.model.placement import Placement, counts_text, even_cuts, pair_factors, rechunk
from optpipe.model.records import COMPUTE_MS, UPDATE, StageCosts
from optpipe.options import SolveOptions
from optpipe.process.protocol import Incumbent, Programs
from optpipe_solver.heuristics import generate, join_pairs

TIMES = (*COMPUTE_MS, "offload_ms", "reload_ms", "evict_ms", "load_ms", *UPDATE)


@st.composite
def piped(draw: Any, layered: bool | None = None) -> Problem:
    """One route over any devices; with or without layers, as many as four chunks could be made of."""
    devices = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    count = draw(st.integers(12, 16)) if (draw(st.booleans()) if layered is None else layered) else 0
    return Problem(
        microbatches=2,
        devices=[Device(activation_budget_bytes=AMPLE, peer=(d + 1) % 3) for d in range(3)],
        stages=[draw(stages(d, evicting=True, updating=True)) for d in devices],
        layers=[draw(stages(0)).model_dump(exclude={"device"}) for _ in range(count)] or None,
    )


def layer(ms: float, size: int = 1, **more: Any) -> StageCosts:
    return StageCosts(**stage((ms, ms, ms), (size, size), **more))


def plain(devices: int = 4, **fields: Any) -> Problem:
    costs = stage((4, 6, 2), (10, 6), offload=(3, 5, 8), offload_parts=2, recompute=(4, 3))
    return pipeline(devices, 4, 100, costs, **fields)


SENDS = {"forward_exchange": 0.5, "backward_exchange": 0.4}


def test_deepseeks_profile_of_a_pair():
    """128.5 ms for 124.3 ms of compute and 114.5 ms of all-to-all: 0.54 of both in turn."""
    forward, backward = 124.3 / 3 + 114.5 / 2, 2 * 124.3 / 3 + 114.5 / 2
    backward_input = backward - 124.3 / 3
    shares = {"forward_exchange": 114.5 / 2 / forward, "backward_exchange": 114.5 / 2 / backward_input}
    times = {"forward_ms": forward, "backward_input_ms": backward_input, "backward_weight_ms": 124.3 / 3}
    problem = pipeline(1, 2, 99, stage((0, 0, 0)) | times | shares)
    problem = problem.replace(overlap_factor=pair_factors(problem.stages))
    paired = parsed(problem, "0F0 0F1+0BW0 0BW1")
    assert paired.makespan_ms - forward - backward == pytest.approx(128.5, abs=0.05)
    split = parsed(problem, "0F0 0F1+0B0 0W0 0BW1")
    assert check(problem, split) == ["0B0 in the program of device 0: all-to-all is hidden in pairs with BW"]
    assert check(problem.replace(overlap_factor=0.9), split) == []


def test_pairs_that_hide_all_to_all_are_joined_with_whole_backwards():
    """B alone has too little compute to hide as much."""
    problem = pipeline(1, 4, 99, stage((3, 3, 3), (5, 5)) | {"forward_exchange": 0.8, "backward_exchange": 0.8})
    problem = problem.replace(overlap_factor=pair_factors(problem.stages))
    joined = join_pairs(parsed(problem, "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0F3 0BW2 0BW3"))
    assert joined
    assert [text for text in joined.programs[0].texts() if "+" in text] == ["0F3+0BW2"]


def test_a_pair_is_no_shorter_than_one_of_its_ops():
    """A forward without all-to-all hides some of a long backward's, whose own compute cannot all hide the rest."""
    dense, sparse = (
        layer(1.0, **NOTHING_SENT),
        StageCosts(**stage((1.0, 6.0, 1.0)), forward_exchange=0, backward_exchange=0.8),
    )
    assert pair_factors([dense, sparse])[0][1] == pytest.approx(6 / 8)
    assert pair_factors([dense]) == ((1.0,),)


NOTHING_SENT = {"forward_exchange": 0.0, "backward_exchange": 0.0}


def test_factors_by_stages_follow_the_layers_or_are_refused():
    layers = [layer(1.0, **NOTHING_SENT), *[layer(2.0, **SENDS)] * 4, layer(3.0, **NOTHING_SENT)]
    row = pipeline(2, 4, 99, stage(), layers=layers)
    own = Placement(chunks=1, layers=(3, 3)).apply(row)
    own = own.replace(overlap_factor=[[0.9, 0.8], [0.7, 0.6]])
    assert Placement(chunks=1, layers=(3, 3)).apply(own) is own
    placed = Placement(chunks=2, layers=(2, 1, 1, 2)).apply(own)
    assert placed.overlap_factor == pair_factors(placed.stages)
    assert placed.pair_factors[1, 1] < placed.pair_factors[0, 0] < 1
    empty = Placement(chunks=2, layers=(6, 0, 0, 0)).apply(own)
    assert empty.pair_factors[1, 3] == 1, "stages without layers hide nothing"
    whole = rechunk(own.replace(layers=None), 2)  # a half of a stage has its shares
    assert whole.pair_factors[0, 2] == pytest.approx(pair_factors(own.stages)[0][0])
    measured = own.replace(layers=[layer(1.0)] * 6)
    with pytest.raises(
        InputError, match=r"^overlap_factor: its lists are for the stages given; others need one number"
    ):
        Placement(chunks=2, layers=(2, 1, 1, 2)).apply(measured)


def held(problem: Problem, device: int, field: str) -> float:
    return sum(getattr(problem.stages[s], field) or 0 for s in problem.stages_on(device))


def kept_by(costs, name):
    """What stays of an activation that is recomputed by the level of this name, if there is one."""
    return next((level.checkpoint_bytes for level in costs.all_levels if level.name == name), costs.activation_bytes)


@settings(deadline=None)
@given(piped(layered=False), st.integers(1, 4), st.sampled_from(["looped", "v"]))
def test_chunks_lose_no_work_and_no_bytes(problem, chunks, shape):
    placed = rechunk(problem, chunks, shape)
    assert len(placed.stages) == chunks * len({stage.device for stage in problem.stages})
    for d in range(len(problem.devices)):
        for field in TIMES:
            assert held(placed, d, field) == pytest.approx(held(problem, d, field))
        for field in ("activation_bytes", "saved_for_weight_bytes", "offload_bytes", "evict_bytes"):
            assert held(placed, d, field) >= held(problem, d, field)
        for field in ("offload_bytes", "evict_bytes"):
            after, before = (held(each, d, "activation_bytes") - held(each, d, field) for each in (placed, problem))
            assert after >= before
        for can in ("can_offload", "can_evict", "can_update"):
            after, before = ({getattr(s, can) for s in each.stages if s.device == d} for each in (placed, problem))
            assert after == ({True in before} if before else set())
        assert held(placed, d, "activation_bytes") - held(problem, d, "activation_bytes") < 2 * chunks
        for name in {level.name for s in problem.stages_on(d) for level in problem.stages[s].all_levels}:
            after, before = ([x for x in each.stages if x.device == d] for each in (placed, problem))
            again = [[y.recompute_ms for x in each for y in x.all_levels if y.name == name] for each in (after, before)]
            assert sum(again[0]) == pytest.approx(sum(again[1]))
            least = min(sum(kept_by(x, name) for x in before), held(placed, d, "activation_bytes"))
            assert sum(kept_by(x, name) for x in after) >= least
    if chunks != 3:  # a third is no binary fraction
        assert rechunk(placed, chunks, shape).stages == placed.stages


@settings(deadline=None)
@given(piped(layered=True), st.integers(1, 4), st.sampled_from(["looped", "v"]))
def test_stages_of_layers_cost_what_their_layers_cost(problem, chunks, shape):
    placement = Placement.balanced(problem, chunks, shape)
    placed = placement.apply(problem)
    at = 0
    for made, count in zip(placed.stages, placement.layers, strict=True):
        own = problem.layers[at : at + count]
        at += count
        assert made.forward_ms == pytest.approx(sum(layer.forward_ms for layer in own))
        assert made.activation_bytes == sum(layer.activation_bytes for layer in own)
        assert (made.offload_bytes or 0) == sum(layer.offload_bytes or 0 for layer in own)
        assert {level.name for level in made.all_levels} == {level.name for x in own for level in x.all_levels}
        for level in made.all_levels:
            assert level.checkpoint_bytes == sum(kept_by(layer, level.name) for layer in own)
    assert at == len(problem.layers)


def test_chunks_pass_the_devices_in_the_same_order_or_back():
    backwards = plain().replace(routes=[[3, 2, 1, 0]])
    assert [stage.device for stage in rechunk(backwards, 2).stages] == [3, 2, 1, 0, 3, 2, 1, 0]
    assert [stage.device for stage in rechunk(plain(), 3, "v").stages] == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    chunk = rechunk(plain(), 2).stages[5]
    assert (chunk.device, chunk.forward_ms, chunk.activation_bytes) == (1, 2.0, 5)
    assert (chunk.offload_bytes, chunk.offload_parts) == (4, 2)
    assert chunk.checkpoint_bytes == 3  # the input of a chunk is as large as the input of the whole stage


@settings(deadline=None)
@given(piped())
def test_bidirectional_routes_pass_the_devices_in_both_directions(problem):
    row, placed = rechunk(problem, 1), rechunk(problem, 1, "bidirectional")
    p = len(row.stages)
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
        layers = Placement.balanced(problem, 1, "bidirectional").layers
        assert (sum(layers), len(layers)) == (len(problem.layers), p)


def test_bidirectional_stages_fit_both_of_their_devices():
    layers = [layer(1.0, 30)] * 6
    roomy, tight = (pipeline(3, 4, memory, stage(), layers=layers) for memory in ([90, 200, 60], [90, 200, 30]))
    assert Placement.balanced(roomy, 1).layers == (2, 2, 2)
    assert Placement.balanced(tight, 1).layers == (2, 3, 1)
    # Both directions run the same layers, so the first device takes no more than the last one has memory for.
    assert Placement.balanced(tight, 1, "bidirectional").layers == (1, 4, 1)


def test_bidirectional_placements_have_one_chunk():
    wrong = "a bidirectional placement has chunks = 1, one stage a device each way$"
    with pytest.raises(InputError, match=rf"^placement: chunks = 2: {wrong}"):
        rechunk(plain(), 2, "bidirectional")
    with pytest.raises(InputError, match=r"^placement: chunks = 0: "):
        rechunk(plain(), 0)
    document = json.loads(ScheduleFile.from_schedule(both_ways()).to_json())
    document["placement"]["chunks"] = 3
    with pytest.raises(InputError, match=rf"^schedule: placement: chunks = 3: {wrong}"):
        ScheduleFile.from_json(json.dumps(document))


def both_ways() -> Schedule:
    """Micro-batches one after the other over both routes: device d has stages d and 7 - d."""
    placement = Placement(chunks=1, shape="bidirectional")
    programs = [" ".join(f"{s}F{j} {s}BW{j}" for j, s in enumerate((d, 7 - d) * 2)) for d in range(4)]
    return parsed(placement.apply(plain()), *programs, method="both ways", placement=placement)


def test_a_stage_offloads_what_its_layers_can_offload():
    leaves = {"offload": (1, 2, 3)}
    layers = [layer(1.0, 4, **leaves, offload_parts=4), layer(1.0, 5), layer(1.0, 4, **leaves, offload_parts=2)]
    layers.append(layer(1.0))
    problem = plain(devices=2, layers=layers)
    first, last = Placement(chunks=1, layers=(3, 1)).apply(problem).stages
    assert (first.activation_bytes, first.offload_bytes, first.offload_parts) == (13, 6, 2)
    assert (first.offload_ms, first.reload_ms) == (2.0, 4.0)
    assert not last.can_offload


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=9), st.integers(1, 3), st.sampled_from([4, 9, 30]))
def test_no_partition_within_memory_has_a_lighter_heaviest_stage(sizes, stages, memory):
    layers = [layer(float(size), size) for size in sizes]
    found = even_cuts(layers, [memory] * stages)

    def heaviest(ends: Sequence[int]) -> tuple[int, int]:
        loads = [sum(sizes[a:b]) for a, b in pairwise((0, *ends, len(sizes)))]
        return max(loads), sum(load**2 for load in loads)

    best = min(map(heaviest, combinations(range(1, len(sizes)), stages - 1)))
    assert (len(found), sum(found)) == (stages, len(sizes))
    if best[0] <= memory:
        assert heaviest(list(accumulate(found))[:-1]) == best


FIVE = plain(layers=[layer(1.0)] * 5)


@pytest.mark.parametrize(
    ("problem", "placement", "sentence"),
    [
        (plain(), {"layers": (1, 1, 1, 1)}, "placement.layers: the problem has none"),
        (FIVE, {}, "placement.layers is missing: the problem has 5 layers, each of 4 stages"),
        (FIVE, {"layers": (5,)}, "placement.layers has 1 entries: 1 chunks a device make 4"),
        (FIVE, {"layers": (1, 1, 1, 1)}, "placement.layers add up to 4: the problem has 5"),
        (
            plain(routes=[[0, 1, 2, 3], [3, 2, 1, 0]], microbatch_routes=[0, 0, 1, 1]),
            {},
            "routes: there are 2, a placement is for one route only",
        ),
    ],
)
def test_a_placement_of_another_problem_is_refused_in_one_sentence(problem, placement, sentence):
    with pytest.raises(InputError, match=sentence):
        Placement(chunks=1, **placement).apply(problem)
    with pytest.raises(InputError, match="chunks = 2: 8 stages cannot be made of 5 layers"):
        rechunk(FIVE, 2)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([2] * 64, "2 each"),
        ([5], "5"),
        ([2, 3, 3, 2], "2 3 3 2"),
        ([1, *[2] * 62, 1], "1, 62×2, 1"),
        ([1, 2, 1, 3, 1, 2, 2, 1, 3], "1 2 1 3 1 2 2 1 3"),
    ],
)
def test_equal_numbers_of_layers_are_told_once(counts: list[int], text: str) -> None:
    assert counts_text(counts) == text
    assert str(Placement(chunks=2, layers=counts)) == f"2 chunks a device, looped, layers {text}"


@pytest.fixture
def placed() -> Schedule:
    placement = Placement(chunks=2, shape="v")
    return replace(generate("adaoffload", placement.apply(plain())), placement=placement)


@pytest.mark.parametrize("way", ["v", "bidirectional"])
def test_frames_and_files_keep_a_placed_schedule(placed, tmp_path, way):
    """Whoever receives a frame applies the placement to its own problem."""
    schedule = placed if way == "v" else both_ways()
    assert check(schedule.problem, schedule) == []
    sent = Programs.model_validate_json(Programs.from_schedule(schedule).model_dump_json(exclude_none=True))
    received = sent.schedule(plain(), schedule.method)
    assert (received.problem, received.placement) == (schedule.problem, schedule.placement)
    slower = plain().replace(p2p_ms=1.0)
    assert sent.schedule(slower, "").problem == schedule.placement.apply(slower)
    schedule.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == schedule


def test_a_solver_that_must_keep_the_stages_cannot_place_them(placed):
    frame = Incumbent(method="liar", schedule=Programs.from_schedule(placed))
    kept, free = (Keeper(plain(), SolveOptions(placements=placements)) for placements in ("keep", "all"))
    assert not kept.take(frame)
    assert kept.result.schedule is None
    assert kept.result.notes[0].endswith(
        "of liar was rejected: 2 chunks a device, V-shaped: the stages were to be kept"
    )
    assert free.take(frame)
    assert free.result.makespan_ms == placed.makespan_ms


def test_check_accepts_the_problem_asked_about_or_the_one_in_the_file(placed, tmp_path, capsys):
    from optpipe_cli.schedule_commands import check, simulate

    placed.save(tmp_path / "s.json")
    plain().save(tmp_path / "asked.json")
    placed.problem.save(tmp_path / "placed.json")
    plain().replace(p2p_ms=1.0).save(tmp_path / "slower.json")
    plain().replace(microbatches=5).save(tmp_path / "longer.json")
    for name in ("asked.json", "placed.json"):
        check(tmp_path / name, tmp_path / "s.json")
        assert "valid: " in capsys.readouterr().out
    told = "placement = 2 chunks a device, V-shaped: does not make the problem in the file of this one: "
    for name, difference in ("slower", "p2p_ms = 1.0, in the file 0.0"), ("longer", "microbatches = 5, in the file 4"):
        with pytest.raises(SystemExit):
            check(tmp_path / f"{name}.json", tmp_path / "s.json")
        line = capsys.readouterr().out.splitlines()[0]
        assert (line[: len(told)], line.endswith(difference)) == (told, True)
    simulate(tmp_path / "slower.json", tmp_path / "s.json")
    assert "makespan" in capsys.readouterr().out
