"""Measurements of other programs become a problem: what is found, what is said to be unknown, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.traces.timelines import named, ops, posed, ran, saved, timeline

from optpipe import InputError, Schedule, certify, problem_from, solve
from optpipe.diagnose import diagnose
from optpipe.measured import estimate
from optpipe.measured.convert import recording_from
from optpipe.measured.estimate import ACTIVATION_BYTES
from optpipe.measured.readers import READERS, RunFacts
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement
from optpipe_solver.systems import generate

PUBLISHED = Path(__file__).parents[2] / "examples" / "traces" / "primus-8x16"
DURATIONS = "stage,op,microbatch,duration_ms\n"
HEADER = "stage,op,microbatch,start_ms,end_ms,device,step\n"


def test_the_published_trace_replayed_from_its_medians() -> None:
    """AMD's trace of 8 ranks and 16 micro-batches: within 2 % of the iteration that was measured."""
    totals = [json.loads(path.read_text())["15"]["total"] for path in sorted(PUBLISHED.glob("pp_rank_*.json"))]
    assert max(totals) == pytest.approx(3253.6, abs=0.1)
    found = problem_from("primus", PUBLISHED)
    assert found.replayed_ms == pytest.approx(max(totals), rel=0.02)
    backwards = [70.22, 69.71, 70.99, 68.82, 70.02, 70.18, 69.23, 75.18]  # as published
    assert [times[Kind.BW].ms for times in found.stages] == pytest.approx(backwards, rel=0.003)
    assert [device.activation_budget_bytes for device in found.problem.devices] == [12 * n for n in range(8, 0, -1)]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_chunks_of_a_measured_stage_hold_its_activation_together(chunks: int) -> None:
    """Of an activation of one byte each chunk held all, so interleaved 1F1B needed twice what `diagnose` says."""
    problem = problem_from("primus", PUBLISHED).problem
    chunked = Placement(chunks=chunks).apply(problem)
    assert {chunks * stage.activation_bytes for stage in chunked.stages} == {problem.stages[0].activation_bytes}


def test_a_problem_and_a_diagnosis_of_one_trace_agree_on_activations() -> None:
    """What the fullest device held, and what interleaved 1F1B holds."""
    found = problem_from("primus", PUBLISHED)
    assert any("96 for what the fullest held" in sentence for sentence in found.unknown)
    cures = diagnose(*recording_from([PUBLISHED]), time_limit_s=0.0).cures
    assert max(cures.held) * ACTIVATION_BYTES == 96
    (cure,) = (cure for cure in cures.cures if "interleaved" in cure.title)
    schedule = generate("interleaved", Placement(chunks=2).apply(found.problem))
    assert [peak.bytes / ACTIVATION_BYTES for peak in certify(schedule.problem, schedule).device] == list(
        cure.activations
    )


def test_a_search_goes_on_from_what_was_measured() -> None:
    """By default a schedule gets the memory that the measured one needed, and a split backward gains nothing."""
    found = problem_from("primus", PUBLISHED)
    assert certify(found.problem, found.schedule).fits
    result = solve(found.problem, method="1f1b")
    assert result.makespan_ms == pytest.approx(found.replayed_ms)
    apart = problem_from("primus", PUBLISHED, weight_share=0.4).problem.stages[0]
    assert apart.backward_weight_ms == pytest.approx(0.4 * (apart.backward_weight_ms + apart.backward_input_ms))


LOG = """ [2026-11-01 10:00:00] iteration       {n}/       5 | elapsed time per iteration (ms): 700.0 |
times across ranks (ms):
  forward-backward:
     rank  0: 699.00
     rank  1: 699.00
  forward-compute:
     rank  0: {a}
     rank  1: 80.00
     rank  2: 120.00
     rank  3: 100.00
  backward-compute:
     rank  0: 160.00
     rank  1: 160.00
     rank  2: 200.00
     rank  3: 220.00
"""


def test_megatrons_timers(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(LOG.format(n=n, a=a) for n, a in enumerate((4000.0, 84.0, 88.0), 1)))
    found = problem_from("megatron-timers", log, microbatches=4, devices=2)  # two ranks a device
    assert [stage.forward_ms for stage in found.problem.stages] == [22.0, 30.0]
    assert [times[Kind.BW].ms for times in found.stages] == [40.0, 55.0]
    assert found.stages[0][Kind.F].count == 12, "each micro-batch of each iteration has its share"
    one = problem_from("megatron-timers", log, microbatches=4, devices=2, step=1).problem
    assert [stage.forward_ms for stage in one.stages] == [21.0, 30.0]
    assert found.schedule is None
    assert [device.activation_budget_bytes for device in found.problem.devices] == [48, 48]
    said = " ".join(found.unknown)
    assert "the activation budget: no limit" in said
    assert "the time of messages: 0" in said
    in_chunks = problem_from("megatron-timers", log, microbatches=4, chunks=2).problem
    assert [stage.device for stage in in_chunks.stages] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert in_chunks.stages[2].forward_ms == 15.0


def traced(fields: str) -> str:
    """A trace with one forward."""
    return f'{{"traceEvents": [{{"ph": "X", "name": "PP:0F0", "tid": 1, "cat": "user_annotation", {fields}}}]}}'


WRONG = {
    "cvs": [("", r"form = 'cvs': one of torch-trace, primus, .* is expected; did you mean csv\?")],
    "csv": [
        ("stage,op,microbatch,start_ms\n", r"t, line 1: no column end_ms: "),
        (HEADER + "0" * 200_000, r"t, line 2: no line of a table: field larger than field limit"),
        (HEADER + f"0,{'X' * 5000},0,0,1,,\n", f"t, line 2: op = '{'X' * 40}': one of F, B, W, BW is"),
        # Many columns, which would take minutes if each line were as long.
        (DURATIONS.strip() + ",x" * 250_000 + "\n" + "0,F,0,1\n" * 30_000 + "0,X,0,1\n", "t, line 30002: op = 'X'"),
        (HEADER + "0,F,-1,0,1,,\n", r"t, line 2: microbatch = '-1': a number from 0 is expected"),
        (HEADER + f"0,F,{'9' * 5000},0,1,0,\n", r"a number from 0 is expected, of 9 digits at most$"),
        (HEADER + "0,F,0,0,now,,\n", r"t, line 2: end_ms = 'now': a time in ms is expected"),
        (HEADER + "0,F,0,2,1,,\n", r"t, line 2: the op takes -1 ms: no less than 0 is expected"),
        (HEADER + "0,F,0,0,1,,\n", r"no backward of stage 0 was measured: a BW, or a B and a W"),
        (HEADER + "1,F,0,0,1,,\n1,BW,0,1,2,,\n", r"no forward of stage 0 was measured"),
        (HEADER + "0,F,0,0,1,,\n0,BW,0,1,2,1,\n", r"stage 0 is on device 0 and on 1"),
        (HEADER + "0,F,0,0,1,,\n0,F,0,5,6,,\n0,BW,0,1,2,,\n", r"^0F0 is there twice in step 0: an op runs once"),
        (HEADER + "0,F,0,0,1,300000000,\n", r"^300000001 devices: at most 4096 are supported$"),
        (DURATIONS + "0,F,0,0\n0,BW,0,0\n", r"^a step takes 0 ms: the times of its ops are expected"),
    ],
    "megatron-timers": [
        ("forward-compute: 3", r"no times of forward-compute by rank: run Megatron with --timing"),
        (LOG.format(n=1, a=4.0) + "  rank 300000000: 1.0", r"^300000001 stages: at most 4096 are supported"),
        ("a" * 10**6, "no times of forward-compute"),  # would take an hour if a name were sought from each character on
    ],
    "torch-trace": [
        ("{}", r"t: no trace of torch\.profiler"),
        (traced('"ts": 0, "dur": 1').replace("user_", ""), r"t: no range such as PP:0F3"),
        (traced('"ts": 0, "dur": "1"'), r"t: not as torch\.prof"),
        (traced('"ts": 0, "dur": -1'), r"0F0 .* takes -0\.001 ms"),
    ],
    "primus": [
        ('{"pp_size": 1, "vp_size": 0, "num_mbs": 2}', r"config\.json: .*: 0 stages: at least 1 is needed"),
        ("{}", r"config\.json: pp_size, vp_size and num_mbs are expected"),
        ('{"pp_size": 1, "vp_size": 1, "num_mbs": 2}', r"^pp_rank_0\.json is missing: all files that dump_pp_data"),
    ],
}


@pytest.mark.parametrize("form", WRONG)
def test_what_cannot_be_used_is_one_sentence(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("config.json" if form == "primus" else "t")
    for text, message in WRONG[form]:
        path.write_text(text)
        given = {"microbatches": 2} if form == "megatron-timers" else {}
        with pytest.raises(InputError, match=message):
            problem_from(form, path, **given)


@pytest.mark.parametrize(("name", "value"), [("microbatches", 4), ("devices", 2), ("chunks", 3), ("shape", "v")])
@pytest.mark.parametrize("form", READERS)
def test_a_fact_that_a_form_does_not_take_is_refused(form: str, name: str, value: Any, tmp_path: Path) -> None:
    """Files that can be read without it, so that nothing else is refused."""
    texts = {"csv": DURATIONS + "0,F,0,1\n0,BW,0,2\n", "straggler": json.dumps(timeline())}
    (tmp_path / "t").write_text(texts.get(form, ""))
    if name in READERS[form].takes:
        assert form in ("megatron-timers", "primus", "straggler"), "whose own tests show what it changes"
        return
    with pytest.raises(
        InputError, match=rf"^{name} = {value}: files of the form {form} have it; it is for .*megatron-t"
    ):
        recording_from([tmp_path / "t"], form, RunFacts(**{name: value}))


def test_files_of_vescale_have_their_micro_batches_by_order(tmp_path: Path) -> None:
    """One file a host, each with a rank of each of two replicas and with what is no op; the ranks of tensor parallelism
    compute the same."""
    files = []
    for host in range(2):
        events = [named("process_name", replica, 0, f"dp rank[{replica}]") for replica in range(2)]
        for replica in range(2):
            for event in ops(ran(16, 0), replica, 16, 1e9):
                for tensor in range(2):
                    rank = 4 * replica + 2 * (event["tid"] // 10) + tensor
                    if event["tid"] // 10 == host:
                        args = {"rank": rank, "step": 16, "tp": tensor, "pp": host}
                        events += [event | {"tid": 10 * rank, "args": args}]
                        events += [event | {"tid": 10 * rank + 1, "name": "forward-recv", "args": args}]
                        events += [named("thread_name", replica, 10 * rank, f"rank[{rank}] main")]
        files.append(tmp_path / str(host) / "trace_step16_16")
        files[-1].parent.mkdir()
        files[-1].write_text(json.dumps(events[::-1]))
    form, recording = recording_from(files, None, RunFacts())
    assert (form, len(recording.ops)) == ("straggler", 24)
    for replica in range(2):
        made = problem_from("straggler", files, replica=replica)
        assert made.problem.costs.ms.tolist() == posed(16, 0).costs.ms.tolist()
        assert [program.texts() for program in made.schedule.programs] == [each.texts() for each in ran(16, 0).programs]
    moved = json.loads(files[0].read_text())
    next(event for event in moved if event["name"] == "forward-compute")["args"]["pp"] = 7
    files[0].write_text(json.dumps(moved))
    with pytest.raises(InputError, match=r"event \d+: args.pp and args.tp = \(.*\): other ops of its thread have \("):
        problem_from("straggler", files)


def test_a_few_ops_with_large_numbers_are_no_step_that_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of one with so many forwards take hundreds of MB."""
    monkeypatch.setattr(estimate, "Schedule", None)
    rows = [f"{s},F,65535,{s},{s + 1},{s},\n{s},BW,65535,{99 - s},{100 - s},{s},\n" for s in range(64)]
    (tmp_path / "t").write_text(HEADER + "".join(rows))
    with pytest.raises(InputError, match=r"^no step is whole: step 0 lacks 0F0; a whole training step is expected$"):
        problem_from("csv", tmp_path / "t")


def test_too_many_micro_batches_are_refused_before_any_op_is_made(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG.format(n=1, a=84.0))
    for microbatches, expected in ((0, "at least 1 is needed"), (100_000_000, "at most 65536 are supported")):
        with pytest.raises(InputError, match=f"^{microbatches} micro-batches: {expected}$"):
            problem_from("megatron-timers", log, microbatches=microbatches)
    with pytest.raises(InputError, match=r"^128 stages and 65536 micro-batches: at most 4194304 forwards together$"):
        problem_from("megatron-timers", log, microbatches=65536, chunks=32)


@pytest.mark.parametrize(("given", "step", "replica"), [({"step": 16, "replica": 1}, 16, 1), ({}, 40, 0)])
def test_a_step_of_a_replica_gives_its_problem_and_order_back_by_default_the_last_of_the_first(
    given: dict[str, int], step: int, replica: int, tmp_path: Path
):
    made = problem_from("straggler", saved({"traceEvents": timeline()}, tmp_path), **given)
    expected = ran(step, replica)
    assert made.problem.costs.ms.tolist() == expected.problem.costs.ms.tolist()
    assert made.problem.p2p_ms == 0.5
    assert [program.texts() for program in made.schedule.programs] == [each.texts() for each in expected.programs]
    assert made.measured_ms == pytest.approx(made.replayed_ms)
    assert made.replayed_ms == expected.makespan_ms
    counts = f"1 of 2 replicas: this is replica {replica}", f"1 of 2 steps: this is step {step}"
    assert made.unused == ("what is no op: 1 optimizer", *counts)


@pytest.mark.parametrize(("shape", "where"), [("looped", (0, 1, 0, 1)), ("v", (0, 1, 1, 0))])
def test_chunks_lie_as_the_shape_says_and_of_tensor_parallel_ranks_the_first_counts(
    shape: str, where: tuple[int, ...], tmp_path: Path
):
    """By the other shape stages do not wait for each other, so nothing is replayed, and nothing diagnosed."""
    posed_here = posed(0, 0, 2)
    stages = [stage.model_copy(update={"device": d}) for stage, d in zip(posed_here.stages, where, strict=True)]
    order = [f"{s}{op}" for op, ss in (("F", range(4)), ("BW", range(3, -1, -1))) for s in ss]
    programs = [[f"{each}{j}" for j in range(3) for each in order if where[int(each[0])] == d] for d in range(2)]
    schedule = Schedule.parse(posed_here.replace(stages=stages), programs)
    names = [named("thread_name", 0, 10 * d, f"PP rank {d}, TP rank 0, compute") for d in range(2)]
    second = [{**event, "tid": 99, "dur": 1e9} for event in ops(schedule, 0, 0, 0) if event["tid"] == 10]
    content = [*names, named("thread_name", 0, 99, "PP rank 1, TP rank 3"), *ops(schedule, 0, 0, 0), *second]
    path = saved(content, tmp_path)
    made = problem_from("straggler", path, shape=None if shape == "looped" else shape)
    assert [stage.device for stage in made.problem.stages] == list(where)
    assert made.replayed_ms == schedule.makespan_ms
    assert made.unused == ("12 ops of other tensor parallel ranks than 0: all compute the same ops",)
    other = "v" if shape == "looped" else "looped"
    assert problem_from("straggler", path, shape=other).schedule is None
    with pytest.raises(InputError, match=r"^stages 2 and 3 do not wait for each other: one begins .* ms too early$"):
        diagnose(*recording_from([path], facts=RunFacts(shape=other)))


def test_one_step_of_another_form_has_its_own_times_too(tmp_path: Path):
    lines = [f"0,F,{j},{(1 + j) * (1 + step)},{step}\n0,BW,{j},4,{step}\n" for step in range(3) for j in range(2)]
    (tmp_path / "t").write_text("stage,op,microbatch,duration_ms,step\n" + "".join(lines))
    made = problem_from("csv", tmp_path / "t", step=1, weight_share=0.25)
    (stage,) = made.problem.stages
    assert (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) == ((2, 4), 3, 1)
    assert "2 of 3 steps: this is step 1" in made.unused


def test_a_fused_backward_of_one_micro_batch_divides_as_the_others_do(tmp_path: Path):
    rows = ("F,0,2", "B,0,3", "W,0,1", "F,1,2", "B,1,3", "W,1,1", "F,2,2", "BW,2,8")
    (tmp_path / "t").write_text(DURATIONS + "".join(f"0,{row}\n" for row in rows))
    (stage,) = problem_from("csv", tmp_path / "t", step=0).problem.stages
    assert (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) == (2, (3, 3, 6), (1, 1, 2))


def _changed(**fields: Any) -> Callable[[list[dict[str, Any]]], Any]:
    """Changes the first op; fields of `args` in a dict."""

    def change(events: list[dict[str, Any]]) -> Any:
        first = next(event for event in events if event["ph"] == "X")
        args = fields.get("args", {})
        first.update(fields | {"args": args if args is None else first["args"] | args})
        return events

    return change


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (lambda events: {"events": events}, {}, "no timeline: a list of events, or an object with traceEvents"),
        (lambda events: [*events, 3], {}, "no timeline: a list of events"),
        (lambda events: [event for event in events if event["ph"] == "M"], {}, "no op: events of the name forward-"),
        (lambda events: [event for event in events if event["ph"] == "X"], {}, "no thread has a rank: names such as"),
        (_changed(tid=11), {}, "event 0: thread 11 of process 6 has no name such as 'PP rank 0"),
        (_changed(ts=None), {}, "event 0: ts = None: a time in us is expected"),
        (_changed(dur="3"), {}, "event 0: dur = '3': a time in us is expected"),
        (_changed(dur=-3), {}, "event 0: dur = -3: no less than 0 is expected"),
        (_changed(args=None), {}, "event 0: args is missing: step and mb_id are expected"),
        (_changed(args={"mb_id": -1}), {}, "event 0: args.mb_id = -1: a number from 0 is expected"),
        (_changed(args={"step": 10**9}), {}, "event 0: args.step = 1000000000: a number from 0"),
        (_changed(args={"model_chunk": 5000}), {}, "10002 stages: at most 4096 are supported"),
        (_changed(name="forward-compute", args={"mb_id": 0}), {"replica": 1}, "1F0 is there twice in step 40"),
        (list, {"step": 17}, "^step = 17: one of the training steps 16, 40 is expected$"),
        (list, {"replica": 2}, "^replica = 2: one of the replicas 0, 1 is expected$"),
    ],
)
def test_a_timeline_that_cannot_be_used_is_one_sentence(
    change: Any, given: dict[str, int], message: str, tmp_path: Path
):
    with pytest.raises(InputError, match=message):
        problem_from("straggler", saved(change(timeline()), tmp_path), **given)
