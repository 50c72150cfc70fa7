"""Which steps of a recording count, which ranks and stages belong together, and what is said of the rest."""

import gzip
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import problems
from support.traces import recordings
from support.traces.recordings import DEVICE, HOST, event

from optpipe import InputError, Measurements, Schedule, problem_from
from optpipe.model.ops import Kind
from optpipe_solver.systems import generate

UNEVEN = problems.pipeline(3, 4, 100, [problems.stage((3 + s, 6 + s, 0)) for s in range(3)], p2p_ms=2.0)
TWO = problems.pipeline(2, 2, 100, [problems.stage((10, 20, 0))] * 2)
FUSED = generate("1f1b", UNEVEN)
SHORT = generate("1f1b", TWO)


def read(form: str, schedule: Schedule, plan: str, folder: Path, ahead: float = 0.0) -> Measurements:
    if form == "csv":
        return of_table(recordings.csv_table(schedule, plan, ahead), folder)
    if form == "primus":
        return problem_from("primus", recordings.primus_dump(schedule, plan, folder))
    events = recordings.torch_events(schedule, plan, DEVICE if form == "gpu" else HOST, ahead)
    return of_torch(events, folder)


def of_torch(events: list[list[dict[str, Any]]], folder: Path) -> Measurements:
    return problem_from("torch-trace", recordings.torch_traces(events, folder))


def of_table(text: str, folder: Path, **options: Any) -> Measurements:
    (folder / "OPS.CSV").write_text(text, encoding="utf-8")
    return problem_from("csv", folder / "OPS.CSV", **options)


def require_same(found: Measurements, schedule: Schedule) -> None:
    """The problem, the order and the length of a step are those of the schedule."""
    for stage, expected, times in zip(found.problem.stages, schedule.problem.stages, found.stages, strict=True):
        assert stage.device == expected.device
        assert stage.forward_ms == pytest.approx(expected.forward_ms)
        backward_ms = expected.backward_input_ms + expected.backward_weight_ms
        assert stage.backward_input_ms + stage.backward_weight_ms == pytest.approx(backward_ms)
        assert stage.backward_weight_ms == pytest.approx(expected.backward_weight_ms if Kind.W in times else 0)
    assert found.problem.microbatches == schedule.problem.microbatches
    assert found.problem.p2p_ms == pytest.approx(schedule.problem.p2p_ms)
    assert found.schedule.programs == schedule.programs
    assert (found.replayed_ms, found.measured_ms) == (pytest.approx(schedule.makespan_ms),) * 2


@pytest.mark.parametrize("form", ["csv", "primus", "gpu", "host"])
@pytest.mark.parametrize("plan", ["t", "te", "et", "eet", "tet", "ttc", "etec", "tcet"])
def test_only_whole_training_steps_count(form: str, plan: str, tmp_path: Path) -> None:
    found = read(form, FUSED, plan, tmp_path, ahead=-7000.0)
    require_same(found, FUSED)
    assert found.stages[0][Kind.F].count == 4 * plan.count("t")
    said = " ".join(found.unused)
    assert bool(found.unused) == (plan != "t")
    assert ("forwards only" in said) == ("e" in plan)
    assert ("not all ops" in said) == ("c" in plan)


@pytest.mark.parametrize("form", ["csv", "primus", "gpu", "host"])
@pytest.mark.parametrize(("plan", "message"), [("ee", "forwards only, as in an evaluation"), ("c", "lacks|measured")])
def test_a_recording_without_a_whole_step_is_refused(form: str, plan: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(form, FUSED, plan, tmp_path)


def test_ranks_with_different_numbers_of_steps_are_matched_by_their_clocks(tmp_path: Path) -> None:
    """Rank 1 was profiled one step less at the beginning."""
    events = recordings.torch_events(SHORT, "ttt", DEVICE)
    events[1] = [each for each in events[1] if each["ts"] >= 1e3 * recordings.STEP_MS]
    found = of_torch(events, tmp_path)
    require_same(found, SHORT)
    assert found.unused == ("1 of 3 steps has not all ops, such as 1F0 in step 0: left out",)
    for each in events[1]:
        each["ts"] += 1e7
    with pytest.raises(InputError, match=r"rank0\.json has 3 steps, .*rank1\.json has 2, and their clocks do not say"):
        of_torch(events, tmp_path)


def test_an_op_that_is_twice_in_a_step_and_a_profile_that_begins_within_one_are_refused(tmp_path: Path) -> None:
    events = recordings.torch_events(SHORT, "tt", DEVICE)
    late = next(each for each in events[0] if each["name"] == "PP:0B1" and each["ts"] > 1e6)
    events[0].append({**late, "ts": late["ts"] + 50_000})
    with pytest.raises(InputError, match=r"rank0\.json: 0BW1 has no forward before it in its step: begin and end"):
        of_torch(events, tmp_path)
    events[0] = [each for each in events[0] if each["ts"] > 10_000]
    with pytest.raises(InputError, match=r"rank0\.json: 0BW0 has no forward before it in its step"):
        of_torch(events, tmp_path)


def test_a_rank_whose_trace_is_missing(tmp_path: Path) -> None:
    """Its neighbour's messages tell, or the group of the pipeline; else a line does."""
    alone = recordings.torch_events(SHORT, "t", DEVICE)[:1]
    (path,) = recordings.torch_traces(alone, tmp_path, world_size=4)
    found = problem_from("torch-trace", path)
    assert "the other 3 of 4 ranks: their traces were not given; they may be replicas" in found.unused
    content = json.loads(path.read_text())
    content["distributedInfo"]["pg_config"] = [{"pg_desc": "mesh_pp", "ranks": [0, 2]}]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"the trace of rank 2 is missing, which is in the pipeline of .*rank0\.json"):
        problem_from("torch-trace", path)
    (path,) = recordings.torch_traces([[*alone[0], event("PP:0SEND_F0", 5.0, 1.0, HOST)]], tmp_path)
    missing = r"a rank is missing: a stage in .*rank0\.json exchanges messages with stage 1"
    with pytest.raises(InputError, match=missing):
        problem_from("torch-trace", path)
    (_, last) = recordings.torch_traces(recordings.torch_events(SHORT, "t", DEVICE), tmp_path)
    with pytest.raises(InputError, match=r"no forward of stage 0 was measured: .* the file of a rank may be missing"):
        problem_from("torch-trace", last)


def test_files_in_a_folder_in_a_list_or_in_one(tmp_path: Path) -> None:
    events = recordings.torch_events(FUSED, "tt", HOST, ahead=123.0)
    paths = recordings.torch_traces(events, tmp_path)
    packed = tmp_path / "rank2.json.gz"
    packed.write_bytes(gzip.compress(paths[2].read_bytes()))
    paths[2].unlink()
    require_same(problem_from("torch-trace", tmp_path), FUSED)
    require_same(problem_from("torch-trace", [*paths[:2], packed]), FUSED)
    together = tmp_path / "together.txt"
    together.write_text("\ufeff" + json.dumps({"traceEvents": [*chain.from_iterable(events)]}))
    require_same(problem_from("torch-trace", together), FUSED)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no traces in this folder"):
        problem_from("torch-trace", tmp_path / "empty")
    with pytest.raises(InputError, match="is a folder, a file is expected"):
        problem_from("csv", tmp_path)
    with pytest.raises(InputError, match="the folder that dump_pp_data writes is expected"):
        problem_from("primus", together)


V = problems.pipeline(
    2, 4, 100, [problems.stage((f, 10, 10), device=d) for f, d in ((10, 0), (10, 1), (10, 1), (20, 0))]
)
LOOPED = problems.pipeline(2, 4, 100, [problems.stage((10, 10, 10), device=d) for d in (0, 1, 0, 1)])


@pytest.mark.parametrize(("problem", "system", "shape"), [(V, "zb-v", "v"), (LOOPED, "interleaved", "looped")])
def test_how_chunks_lie_follows_from_their_times(problem: Any, system: str, shape: str, tmp_path: Path) -> None:
    schedule = generate(system, problem)
    folder = recordings.primus_dump(schedule, "te", tmp_path)
    found = problem_from("primus", folder)
    require_same(found, schedule)
    require_same(problem_from("primus", *folder.glob("*.json")), schedule)
    assert any("the looped placement" in sentence for sentence in found.unused) == (shape == "v")
    require_same(problem_from("primus", folder, shape=shape), schedule)
    other = "looped" if shape == "v" else "v"
    wrong = f"shape = '{other}': stages .* do not wait for each other.* the shape {shape}"
    for given, message in (other, wrong), ("q", "^shape = 'q': one of looped, v is expected"):
        with pytest.raises(InputError, match=message):
            problem_from("primus", folder, shape=given)


def test_lists_without_numbers_are_in_megatrons_order(tmp_path: Path) -> None:
    schedule = generate("interleaved", LOOPED)
    require_same(problem_from("primus", recordings.primus_dump(schedule, "tc", tmp_path, numbered=False)), schedule)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda ops: {"fwd_chunk": [2, *ops["fwd_chunk"][1:]]},
            r"pp_rank_1\.json: .*iteration 0 has fwd of micro-batch .*: 4 and 2 are num",
        ),
        (
            lambda ops: {"bwd_minibatch": [-1, *ops["bwd_minibatch"][1:]]},
            r"pp_rank_1\.json: .*iteration 0 has bwd of micro-batch -1 and chunk .*: 4 and 2 are num",
        ),
        (
            lambda ops: {"bwd_start": ops["fwd_start"]},
            r"pp_rank_1\.json: .*iteration 0 has a forward and a backward that run as one",
        ),
        (
            lambda ops: {name: ops[name][:-1] for name in ops if name.startswith("bwd")},
            "no step is whole: step 0 lacks 1BW3; a whole training step is expected",
        ),
    ],
)
def test_a_dump_with_wrong_ops_is_refused(spoil: Callable[[Any], dict[str, Any]], message: str, tmp_path: Path) -> None:
    path = recordings.primus_dump(generate("interleaved", LOOPED), "t", tmp_path) / "pp_rank_1.json"
    content = json.loads(path.read_text())
    content["0"] |= spoil(content["0"])
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        problem_from("primus", tmp_path)


def renumbered(text: str, number: Callable[[int, int], int]) -> str:
    header, *lines = text.splitlines()
    rows = [line.split(",") for line in lines]
    return "\n".join([header, *(",".join([*row[:2], str(number(int(row[2]), int(row[6]))), *row[3:]]) for row in rows)])


@pytest.mark.parametrize(
    ("number", "told"),
    [(lambda j, _: j + 1, "they begin with 1"), (lambda j, step: j + 4 * step, "they go on from step to step")],
)
def test_micro_batches_that_are_numbered_otherwise(
    number: Callable[[int, int], int], told: str, tmp_path: Path
) -> None:
    found = of_table(renumbered(recordings.csv_table(FUSED, "tt"), number), tmp_path)
    require_same(found, FUSED)
    assert any(told in sentence for sentence in found.unused)
    with pytest.raises(InputError, match="step 0 lacks 0F0"):
        of_table(renumbered(recordings.csv_table(FUSED, "t"), lambda j, _: j + 2), tmp_path)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("start_ms,end_ms\n0,F,0,30,40\n0,BW,0,0,20\n", "0F0 stands after 0BW0"),
        (
            "start_ms,end_ms\n0,F,0,0,10\n1,F,0,0,10\n1,BW,0,20,40\n0,BW,0,20,40\n",
            "stages 0 and 1 do not wait for each other: one begins 15 ms too early",
        ),
        ("duration_ms\n0,F,0,10\n0,BW,0,20\n", "not all starts were measured"),
    ],
)
def test_an_order_that_cannot_have_run_is_not_used_and_a_line_says_why(table: str, reason: str, tmp_path: Path) -> None:
    found = of_table("stage,op,microbatch," + table, tmp_path)
    assert found.schedule is None
    assert found.unused == (f"the measured order: {reason}",)


def test_a_budget_below_what_ran_is_told_and_what_is_given_is_not_unknown(tmp_path: Path) -> None:
    options = {"activation_bytes": 10, "activation_budget_bytes": 20, "weight_share": 0.5}
    found = of_table(recordings.csv_table(FUSED, "t", ahead=17.5), tmp_path, **options)
    assert found.unused == (
        "what the measured order holds: 30 bytes on device 0, more than the budget that was given, 20",
    )
    assert [sentence.split(":")[0] for sentence in found.unknown] == [
        "what stays saved from B until W",
        "offloading and recomputing",
    ]


def test_a_split_backward_in_the_letters_of_torch(tmp_path: Path) -> None:
    split = UNEVEN.replace(stages=[{**stage, "backward_weight_ms": 2.0} for stage in UNEVEN.to_dict()["stages"]])
    schedule = generate("zb-h1", split)
    events = recordings.torch_events(schedule, "t", DEVICE)
    found = of_torch(events, tmp_path)
    require_same(found, schedule)
    assert found.unused == ()
    for each in chain.from_iterable(events):
        each["name"] = each["name"].replace("I", "B")  # as versions before 2.5 wrote
    with pytest.raises(InputError, match=r"^\dW\d is there beside \dBW\d in step 0, which is the whole backward"):
        of_torch(events, tmp_path)


def test_of_a_gpu_ranges_on_its_main_stream_count_and_on_a_cpu_an_op_begins_with_its_first_operator(
    tmp_path: Path,
) -> None:
    """As torch writes them: the host's range ends early, and a second stream has a part of the work."""
    host = [event("PP:0F0", 0, 10, HOST), event("PP:0B0", 20, 10, HOST), event("PP:0UNSHARD", 0, 9, HOST)]
    device = [event("PP:0F0", 5, 1000, DEVICE), event("PP:0B0", 1005, 3000, DEVICE)]
    found = of_torch([[*host, *device, event("PP:0F0", 3, 30, DEVICE, tid=20)]], tmp_path)
    assert (found.stages[0][Kind.F].ms, found.stages[0][Kind.BW].ms) == (1.0, 3.0)
    assert not any("host" in sentence for sentence in found.unknown)
    ranges = [event("PP:0F0", 0, 5000, HOST), event("PP:0B0", 5000, 3000, HOST)]
    found = of_torch([[*ranges, *(event("aten::mm", ts, 9, "cpu_op") for ts in (4000, 5000))]], tmp_path)
    assert found.stages[0][Kind.F].ms == 1.0
    assert found.unknown[0] == "times of a device: these are the host's"


@pytest.mark.parametrize("cat", [DEVICE, "cpu_op"])
def test_a_b_that_runs_nothing_takes_no_time(cat: str, tmp_path: Path) -> None:
    """As on a first stage, whose W does all; the host has a range of it, in which it waits for the message."""
    ops = [("F", 0, 1000), ("I", 1000, 500), ("W", 1500, 3000)]
    events = [event(f"PP:0{letter}0", ts, dur, HOST) for letter, ts, dur in ops]
    names = {letter: f"PP:0{letter}0" if cat == DEVICE else "aten::mm" for letter in "FW"}
    events += [event(names[letter], ts, dur, cat) for letter, ts, dur in ops if letter != "I"]
    found = of_torch([events], tmp_path)
    assert (found.problem.stages[0].backward_input_ms, found.problem.stages[0].backward_weight_ms) == (0.0, 3.0)
    assert found.schedule is not None
    assert found.unused == ("the times of B on stage 0: there it runs nothing, so they are 0",)


PAIR = "PP:(0F1;0B0)OVERLAP_F_B"


def test_a_pair_on_a_host_is_divided_where_its_backward_begins(tmp_path: Path) -> None:
    ranges = [event("PP:0F0", 0, 1000, HOST), event(PAIR, 1000, 5000, HOST), event("PP:0B1", 6000, 3000, HOST)]
    forward, backward = "aten::mm", "autograd::engine::evaluate_function: A"
    operators = [(forward, 0, 1000), (forward, 2000, 1000), (backward, 3500, 2500), (backward, 6000, 3000)]
    found = of_torch([[*ranges, *(event(*each, "cpu_op") for each in operators)]], tmp_path)
    assert found.schedule.programs[0].texts() == ["0F0", "0F1", "0BW0", "0BW1"]
    assert (found.stages[0][Kind.F].ms, found.stages[0][Kind.BW].ms) == (1.0, 2.75)
    for given, message in (
        ([event(PAIR, 0, 1000, DEVICE)], r"a pair has one range on a GPU"),
        ([event(PAIR, 0, 1000, HOST)], r"the times of the two ops of this pair cannot be told apart"),
    ):
        with pytest.raises(InputError, match=message):
            of_torch([given], tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\ufeffStage, Op ,microbatch,duration_ms\n0,f,0,1\n0,bw,0,2\n", "not all starts"),
        ("stage,op,microbatch,duration_ms\n0,F,0,1\n0,B,0,2\n\n", "the letter B"),
    ],
)
def test_a_table_in_other_letters(text: str, told: str, tmp_path: Path) -> None:
    found = of_table(text, tmp_path)
    assert (found.stages[0][Kind.F].ms, found.stages[0][Kind.BW].ms) == (1.0, 2.0)
    assert any(told in sentence for sentence in found.unused)
