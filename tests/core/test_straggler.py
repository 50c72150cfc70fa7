"""Timelines of StragglerAnalysis: several steps and replicas, each micro-batch with its own times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.traces.timelines import named, ops, posed, ran, saved, timeline

from optpipe import InputError, Schedule, problem_from


@pytest.mark.parametrize(("step", "replica"), [(16, 1), (40, 0)])
def test_each_step_of_each_replica_gives_its_own_problem_and_order_back(step: int, replica: int, tmp_path: Path):
    made = problem_from("straggler", saved(timeline(), tmp_path), step=step, replica=replica)
    expected = ran(step, replica)
    assert made.problem.costs.ms.tolist() == expected.problem.costs.ms.tolist()
    assert made.problem.p2p_ms == 0.5
    assert made.schedule is not None
    assert [program.texts() for program in made.schedule.programs] == [each.texts() for each in expected.programs]
    assert made.measured_ms == pytest.approx(made.replayed_ms)
    assert made.replayed_ms == expected.makespan_ms


def test_by_default_the_last_step_of_the_first_replica_counts_and_what_else_is_there_is_told(tmp_path: Path):
    made = problem_from("straggler", saved({"traceEvents": timeline()}, tmp_path))
    assert made.replayed_ms == ran(40, 0).makespan_ms
    assert made.unused == (
        "what is no op: 1 optimizer",
        "1 of 2 replicas: this is replica 0",
        "1 of 2 steps: this is step 40",
    )


def test_chunks_lie_looped_and_of_tensor_parallel_ranks_the_first_counts(tmp_path: Path):
    programs = ["0F0 2F0 0F1 2F1 2BW0 0BW0 2BW1 0BW1 0F2 2F2 2BW2 0BW2", "1F0 3F0 1F1 3F1 3BW0 1BW0 3BW1 1BW1 1F2 3F2"]
    schedule = Schedule.parse(posed(0, 0, 2), [programs[0].split(), [*programs[1].split(), "3BW2", "1BW2"]])
    names = [named("thread_name", 0, 10 * d, f"PP rank {d}, TP rank 0, compute") for d in range(2)]
    second = [{**event, "tid": 99, "dur": 1e9} for event in ops(schedule, 0, 0, 0) if event["tid"] == 10]
    content = [*names, named("thread_name", 0, 99, "PP rank 1, TP rank 3"), *ops(schedule, 0, 0, 0), *second]
    made = problem_from("straggler", saved(content, tmp_path))
    assert [stage.device for stage in made.problem.stages] == [0, 1, 0, 1]
    assert made.replayed_ms == schedule.makespan_ms
    assert made.unused == ("12 ops of other tensor parallel ranks than 0: all compute the same ops",)


def test_one_step_of_another_form_has_its_own_times_too(tmp_path: Path):
    path = tmp_path / "ops.csv"
    lines = [f"0,F,{j},{(1 + j) * (1 + step)},{step}\n0,BW,{j},4,{step}\n" for step in range(3) for j in range(2)]
    path.write_text("stage,op,microbatch,duration_ms,step\n" + "".join(lines))
    made = problem_from("csv", path, step=1, weight_share=0.25)
    (stage,) = made.problem.stages
    assert (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) == ((2, 4), 3, 1)
    assert "2 of 3 steps: this is step 1" in made.unused


def test_a_fused_backward_of_one_micro_batch_divides_as_the_others_do(tmp_path: Path):
    path = tmp_path / "ops.csv"
    rows = ("F,0,2", "B,0,3", "W,0,1", "F,1,2", "B,1,3", "W,1,1", "F,2,2", "BW,2,8")
    path.write_text("stage,op,microbatch,duration_ms\n" + "".join(f"0,{row}\n" for row in rows))
    (stage,) = problem_from("csv", path, step=0).problem.stages
    figures = (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
    assert figures == (2, (3, 3, 6), (1, 1, 2))


def _change(**fields: Any) -> Callable[[list[dict[str, Any]]], Any]:
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
        (_change(tid=11), {}, "event 0: thread 11 of process 6 has no name such as 'PP rank 0"),
        (_change(ts=None), {}, "event 0: ts = None: a time in us is expected"),
        (_change(dur="3"), {}, "event 0: dur = '3': a time in us is expected"),
        (_change(dur=-3), {}, "event 0: dur = -3: no less than 0 is expected"),
        (_change(args=None), {}, "event 0: args is missing: step and mb_id are expected"),
        (_change(args={"mb_id": -1}), {}, "event 0: args.mb_id = -1: a number from 0 is expected"),
        (_change(args={"step": 10**9}), {}, "event 0: args.step = 1000000000: a number from 0"),
        (_change(args={"model_chunk": 5000}), {}, "10002 stages: at most 4096 are supported"),
        (_change(name="forward-compute", args={"mb_id": 0}), {"replica": 1}, "1F0 is there twice in step 40"),
        (list, {"step": 17}, "^step = 17: one of the training steps 16, 40 is expected$"),
        (list, {"replica": 2}, "^replica = 2: one of the replicas 0, 1 is expected$"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(change: Any, given: dict[str, int], message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        problem_from("straggler", saved(change(timeline()), tmp_path), **given)
