"""The benchmark that compares measurements with predictions: its figures are those of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ranks.worker import Ranks

from optpipe_cli import demo, demo_packed
from optpipe_cli.fidelity import difference
from optpipe_runtime.demo import reference
from optpipe_runtime.demo.gpt import Size
from optpipe_runtime.demo.on_ranks import load, save
from optpipe_runtime.demo.train import DemoResult, Step
from optpipe_runtime.fidelity import cases, packed
from optpipe_runtime.fidelity.cases import Case, Task
from optpipe_runtime.fidelity.paced import Times

SMALL = Size(width=32, heads=2, blocks=4, context=16, sequences=2)


def require_kept(record: Any, folder: Path) -> None:
    save(record, folder / "record.json")
    assert load(type(record), folder / "record.json") == record


def test_paced_stages_take_their_time_and_no_more_memory_than_predicted(ranks: Ranks, tmp_path: Path) -> None:
    nothing_fits = Case("1f1b", memory=0.5)
    task = Task([Case("1f1b"), nothing_fits, Case("po-f", 2, memory=1.8)], 4, 3, Times(4.0, 3.0, 2.0, 1.0))
    (first, interleaved), _ = ranks(cases.run, task=task)
    assert (first.found_by, interleaved.found_by) == ("1f1b", "po-f")
    for row, least in ((first, 4 * 9 + 4 + 3), (interleaved, 2 * 4 * 9)):
        assert len(row.steps_ms) == 3
        assert min(row.predicted_ms, *row.steps_ms) >= least, (
            "who sleeps is never early: all micro-batches, one F and B on the other rank"
        )
        assert row.measured_peak == row.predicted_peak
    for record in (task, first):
        require_kept(record, tmp_path)


def test_the_gpt_has_the_losses_of_a_plain_run(ranks: Ranks) -> None:
    task = Task([Case("zb-h1"), Case("po-f", 2, memory=1.8)], 4, 2, size=SMALL)
    for row in ranks(cases.run, task=task)[0]:
        plain = reference.losses(SMALL, 2, 4, cases.WARM_UP + 2)
        assert difference(row.losses, plain) < 1e-5
        assert row.measured_peak == row.predicted_peak


def test_all_ways_to_run_packed_documents_train_as_a_plain_run(three_ranks: Ranks, tmp_path: Path) -> None:
    task = packed.Task(4, 2, rounds=2, size=SMALL)
    require_kept(task, tmp_path)
    result = three_ranks(packed.run, task=task)[0]
    assert difference(result.losses, list(reference.trained(SMALL, 3, task.steps()))) < 1e-5
    assert result.within_memory
    require_kept(result, tmp_path)


def test_packed_documents_sleep_as_long_as_predicted_or_longer(ranks: Ranks) -> None:
    times = Times(4.0, 4.0, 2.0, 0.0, saved=2)
    task = packed.Task(4, 2, rounds=2, paced_ms=times, size=SMALL)
    result = ranks(packed.run, task=task)[0]
    batches = task.steps()[packed.WARM_UP :]
    for k, way in enumerate(result.ways):
        for batch, predicted, measured in zip(
            batches[k :: len(packed.WAYS)], way.predicted_ms, way.measured_ms, strict=True
        ):
            lengths = [each.lengths for each in batch if each.lengths is not None]
            least = sum(sum(times.of_documents(each)[:3]) for each in lengths)
            assert measured >= least
            assert predicted >= 0.9 * least
    for row, way in zip(demo_packed.rows(result), result.ways, strict=True):
        assert row[0] == way.name
        assert (row[4] == "") == (way.name == packed.PLANNED)


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
