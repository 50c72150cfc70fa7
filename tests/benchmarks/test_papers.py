"""What is read off the papers, the figures that are theory, and the smallest searches of `table1` and `scale`."""

import math

import pytest

from benchmarks.papers import costs, figures, published, table1
from benchmarks.papers.calibration import BASELINES, budget_bytes, posed, table
from benchmarks.papers.checks import Check
from benchmarks.problems import offloading
from benchmarks.scale import is_steady


def test_a_row_as_a_problem_gives_the_two_columns_again():
    row = table()[2]
    (found,) = posed([row], "span")
    for method in ("1f1b", "po-f"):
        assert found.baselines[method].span_ms == pytest.approx(row.published[method])
    assert 4 <= found.room < 5.5  # 1F1B fits, interleaved 1F1B does not
    assert found.k > 1  # offloading everything is what it waits for
    assert found.work_ms == pytest.approx(row.published["1f1b"] / (8 + 4 - 1))
    assert all(found.fits(method) == (row.published[method] is not None) for method in BASELINES)
    assert found.idle_ms(found.baselines["1f1b"].span_ms) == pytest.approx(3 * found.work_ms)


def test_the_budget_agrees_with_most_cells():
    assert budget_bytes([(10, True), (20, True), (30, False)]) == 25
    assert budget_bytes([(10, True), (30, False), (20, False), (40, True)]) == 15  # as good as any, and the lowest
    assert budget_bytes([(10, True), (20, True)]) == 30


def test_one_row_is_solved_once(bench, monkeypatch, tmp_path):
    words = ("table1", "--rows", 1, "--time-limit", 60, "--placements", "keep", "--results", tmp_path / "results")
    out = bench(*words).out
    monkeypatch.setattr(table1, "compare", None)  # what is in the file is not solved again
    assert bench(*words).out == out
    assert "- out of memory, by the budget that agrees with most runs: 5 of 5" in out
    cells = next(line for line in out.splitlines() if line.startswith("| 1.5B, 4 × 8, size 4 |")).split(" | ")
    assert (cells[8], cells[-1]) == ("1283", "– |")


# How far each source is off: Zero Bubble's and Gemma's times are predicted, not fitted.
LIMITS = {"Primus trace": 0.025, "Zero Bubble": 0.11, "Gemma's layer ratios": 0.17, "packed documents": 0.055}
# Of the whole GPUs one is out by more than a tenth: its allocator's fragments are not published.
COST_LIMITS = {"ChronosPipe, Figure 1(a)": 0.05, "BPipe": 0.05, "PipeOffload, Eq. 1": 0.07, "its paper": 0.08}
COST_LIMITS |= {"ChronosPipe, Figure 9(b)": 0.0, "pith-train": 0.12, "Zero Bubble": 0.27}


@pytest.mark.parametrize(
    ("rows", "limits"), [(published.predictions, LIMITS), (costs.checks, COST_LIMITS)], ids=["published", "costs"]
)
def test_published_figures_are_met(rows, limits):
    off: list[Check] = [row for row in rows() if abs(row.error) > limits[row.source]]
    assert off == []


def test_figures_that_are_theory():
    errors = {row.what: row.error for row in figures.theory()}
    names = (
        "Chronos-Pipe: activations",
        "Chronos-Recomp: activations",
        "Chronos-Pipe computes less of its time than 1F1B",
    )
    assert all(abs(errors[name]) < 0.05 for name in names)
    assert [row.ours for row in figures.constant()] == [3.0] * 3  # however many stages there are
    further, short = figures.why_not_matched()
    assert further.ours == pytest.approx(14.2, abs=0.05)
    assert short.ours < 0.7 * short.published  # with memory for two activations


def test_idle_time_of_two_chunks_is_the_papers_formula():
    """Eq. 4: so many backwards of a chunk, each of two ops."""
    for p in (4, 8, 16):
        assert figures.idle_units(p, 2) == 2 * (p - math.ceil((2 * p - 3) / 6) - 1)


def test_which_memory_allows_a_steady_state():
    """Each activation is held for 236 GB·ms; in 28 ms memory for one, 5 GB, admits 140 GB·ms, for two 280."""
    assert [is_steady(offloading(4, 32, room)) for room in (1, 2, 3)] == [False, True, True]


def test_the_smallest_pipeline_is_measured(bench):
    out = bench("scale", "--devices", 2, "--room", 2, "--time-limit", 60).out
    assert "| 2 | yes | 2 × 16 | 160 | " in out
