"""The pages of `optpipe demo`, and its part on stages that sleep: what is said follows from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optpipe import Problem, Schedule, ScheduleFile
from optpipe.reuse.by_rules import MOST_SIMULATED, by_rules
from optpipe_cli import demo_paced, demo_page
from optpipe_runtime.demo.train import Step
from optpipe_runtime.fidelity.cases import Row
from optpipe_solver.systems import generate as published


def problem() -> Problem:
    """That of the stages that sleep, two a rank, as a quiet machine measures it: each op takes a little longer than it
    sleeps, W also needs the gradient that came in, and the input of the first stage is not the pipeline's to keep."""
    times = demo_paced.tasks()[1].paced_ms
    assert times is not None
    piece, ranks = 2**16, demo_paced.RANKS
    stage = {
        "forward_ms": times.forward + 0.4,
        "backward_input_ms": times.backward_input + 0.7,
        "backward_weight_ms": times.backward_weight + 0.3,
        "offload_ms": times.copy + 0.2,
        "reload_ms": times.copy + 0.2,
        "recompute_ms": times.forward + 0.6,
        "activation_bytes": times.saved * piece,
        "saved_for_weight_bytes": (times.saved + 1) * piece,
        "offload_bytes": times.saved * piece,
    }
    stages = [{"device": s % ranks, **stage, "checkpoint_bytes": piece if s else 0} for s in range(2 * ranks)]
    devices = [{"activation_budget_bytes": 0}] * ranks
    whole = {"microbatches": demo_paced.MICROBATCHES, "p2p_ms": 0.4, "devices": devices, "stages": stages}
    return Problem.from_dict(whole).with_memory_for(demo_paced.MEMORY)


@pytest.fixture(scope="module")
def schedules() -> tuple[Schedule, Schedule]:
    return published(demo_paced.RECOMPUTED, problem()), by_rules(problem(), None, "makespan", MOST_SIMULATED)


def row(case: int, schedule: Schedule, steps_ms: list[float]) -> Row:
    peaks = [peak.bytes for peak in schedule.compiled.certificate.device]
    file = json.loads(ScheduleFile.from_schedule(schedule).to_json())
    return Row(
        demo_paced.tasks()[1].cases[case], schedule.method, schedule.makespan_ms, steps_ms, peaks, peaks, [], file
    )


def test_the_gain_on_stages_that_sleep_is_large_by_prediction(schedules: tuple[Schedule, Schedule]) -> None:
    before, after = schedules
    assert before.compiled.complaints == after.compiled.complaints == []
    assert after.makespan_ms <= 0.7 * before.makespan_ms, "by simple rules, before any engine"
    best = demo_paced.published(problem()).best_published
    assert best is not None
    assert best.method == demo_paced.RECOMPUTED, "no published schedule that fits is shorter"


@pytest.mark.parametrize(("slowest", "told"), [(1100.0, "a gain"), (1501.0, "no gain beyond chance")])
def test_a_gain_is_told_only_beyond_the_spread(
    slowest: float,
    told: str,
    schedules: tuple[Schedule, Schedule],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row(0, schedules[0], [1500.0, 1520.0, 1510.0]), row(1, schedules[1], [1050.0, 1060.0, slowest])]
    monkeypatch.setattr(demo_paced, "measured", lambda task, ranks: rows if len(task.cases) > 1 else [])
    assert demo_paced.run(tmp_path / "page.html")
    printed = capsys.readouterr().out
    assert f"the shortest of the others, by prediction: {demo_paced.RECOMPUTED}, " in printed
    assert printed.splitlines()[-1].endswith(told)
    assert f"{1 - 1060 / 1510:.1%} less than by chronos-recomp" in printed
    assert "1060.0 ± " in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_has_the_losses_the_swaps_and_the_table_as_text(
    schedules: tuple[Schedule, Schedule], tmp_path: Path
) -> None:
    files = [json.loads(ScheduleFile.from_schedule(schedule).to_json()) for schedule in schedules]
    steps = [Step(version, False, True, 5.0 - k / 10, 1.0, [], []) for k, version in enumerate([0, 0, 0, 1, 1, 0])]
    table = ("a title", ("schedule", "loss"), [["<b>mine</b>", "5 → 4"]])
    demo_page.save(tmp_path / "page.html", files[0], files[1], table, steps)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>&lt;b&gt;mine&lt;/b&gt;</td><td>5 → 4</td>" in page
    assert page.count('stroke="#D5DAE0"') == 2, "one line a swap"
    (points,) = [line for line in page.splitlines() if line.startswith("<polyline")]
    heights = [float(point.split(",")[1]) for point in points.split('"')[1].split()]
    assert heights == sorted(heights), "a lower loss is lower in the picture"
