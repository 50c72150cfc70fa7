"""The benchmark that compares measurements with predictions: its figures are those of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.problems import pipeline, stage
from support.ranks.worker import Ranks

from optpipe import ScheduleFile
from optpipe_cli import demo
from optpipe_cli.bench import runtime as bench_runtime
from optpipe_runtime.bench import fidelity, in_a_row
from optpipe_runtime.bench.fidelity import Case, Row, Task
from optpipe_runtime.bench.paced import Times
from optpipe_runtime.demo import reference
from optpipe_runtime.demo.gpt import Size
from optpipe_runtime.demo.train import DemoResult, Step
from optpipe_solver import systems

SMALL = Size(width=32, heads=2, blocks=4, context=16, sequences=2)


def test_paced_stages_take_their_time_and_no_more_memory_than_predicted(ranks: Ranks, tmp_path: Path) -> None:
    nothing_fits = Case("1f1b", memory=0.5)
    task = Task([Case("1f1b"), nothing_fits, Case("po-f", 2, memory=1.8)], 4, 3, Times(4.0, 3.0, 2.0, 1.0))
    task.save(tmp_path / "task.json")
    assert Task.load(tmp_path / "task.json") == task
    (first, interleaved), _ = ranks(fidelity.run, task=task)
    assert (first.found_by, interleaved.found_by) == ("1f1b", "po-f")
    for row, least in ((first, 4 * 9 + 4 + 3), (interleaved, 2 * 4 * 9)):
        assert len(row.steps_ms) == 3
        assert min(row.predicted_ms, *row.steps_ms) >= least, (
            "who sleeps is never early: all micro-batches, one F and B on the other rank"
        )
        assert row.measured_peak == row.predicted_peak
    fidelity.save([first, interleaved], tmp_path / "rows.json")
    assert fidelity.load(tmp_path / "rows.json") == [first, interleaved]


def test_a_step_waits_for_the_messages_of_its_longest_path() -> None:
    problem = pipeline(2, 4, 100, stage())
    schedule = systems.generate("1f1b", problem)
    row = Row(
        Case("1f1b"), "1f1b", schedule.makespan_ms, [], [], [], [], json.loads(ScheduleFile.of(schedule).to_json())
    )
    assert row.messages_in_a_row == pytest.approx(4), "two there, two back, without any slack"
    assert bench_runtime.messages_in_a_row([row]) == f"1f1b {4 / schedule.makespan_ms:+.1%}"


def test_steps_in_a_row_are_compared_with_spans(ranks: Ranks, tmp_path: Path) -> None:
    times, m, steps = Times(1.0, 1.0, 1.0, 0.0), in_a_row.MICROBATCHES, 2
    row, other = ranks(in_a_row.in_a_row, times=times, steps=steps)
    in_a_row.save(row, tmp_path / "row.json")
    assert in_a_row.load(tmp_path / "row.json") == row == other
    assert row.spans_ms == pytest.approx(2 * row.span_ms + row.makespan_ms - row.span_ms)
    assert row.post_validated_ms >= steps * m * sum(times) + times.forward, "who sleeps is never early"
    assert row.clipped_ms >= steps * (m * sum(times) + times.forward)


@pytest.mark.soak
def test_steps_in_a_row_take_a_span_each(four_ranks: Ranks) -> None:
    """And those that wait for each other a makespan. On a busy machine everything takes longer, so this is a soak; that
    no rank waits, test_post_validation shows without a clock."""
    rows = [four_ranks(in_a_row.in_a_row, times=Times(20.0, 20.0, 20.0, 0.0), steps=10)[0] for _ in range(3)]
    assert any(row.deviation < 0.08 and row.post_validated_ms < row.clipped_ms for row in rows), rows


def test_the_gpt_has_the_losses_of_a_plain_run(ranks: Ranks) -> None:
    task = Task([Case("zb-h1"), Case("po-f", 2, memory=1.8)], 4, 2, size=SMALL)
    for row in ranks(fidelity.run, task=task)[0]:
        plain = reference.losses(SMALL, 2, 4, fidelity.WARM_UP + 2)
        assert bench_runtime.difference(row.losses, plain) < 1e-5
        assert row.measured_peak == row.predicted_peak


def told(ms: dict[int, list[float]], rounds: int) -> DemoResult:
    """A live phase, then rounds of two settled steps by version 0 and 2 each, and one after each swap."""
    steps = [Step(1, True, True, 1.0, 1.0, [], []), Step(2, False, True, 1.0, 1.0, [], [])]
    for k in range(rounds):
        for version, times in ms.items():
            steps += [
                Step(version, False, settled, 1.0, took, [], [])
                for settled, took in ((False, 99.0), (True, times[k]), (True, times[k]))
            ]
    return DemoResult({}, [], steps)


@pytest.mark.parametrize(("best", "sure"), [([9.0, 9.5, 8.0, 9.0, 9.2], True), ([9.0, 12.0, 8.0, 13.0, 9.2], False)])
def test_the_gain_of_the_demo_is_computed_round_by_round(best: list[float], sure: bool) -> None:
    found = demo.rounds(told({0: [10.0] * 5, 2: best}, 5), 2, 5)
    assert found == pytest.approx([1 - ms / 10 for ms in best])
    gain = demo.gain_of(found)
    assert gain.low <= gain.median <= gain.high
    assert (gain.low > 0) == sure


def test_without_a_better_schedule_the_gain_is_zero() -> None:
    assert demo.gain_of(demo.rounds(told({0: [10.0] * 5}, 5), 0, 5)) == (0.0, 0.0, 0.0)
