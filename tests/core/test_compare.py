"""`compare`: every method on one problem, verified, in order, and with a reason where one could not run."""

import re
from pathlib import Path

import pytest
from support.problems import pipeline, stage
from support.problems.chain import chain, gpipe, one_by_one

import optpipe
from optpipe import InputError, Problem, Schedule, check, comparison, solvers
from optpipe.options import CompareOptions, SolveOptions
from optpipe.results import Result
from optpipe_solver.compare import EVERY

TESTS = Path(__file__).parents[1]
COSTS = stage((10, 10, 8), (5, 2), offload=(12, 12, 5))


def problem(memory: int = 15, **fields: object) -> Problem:
    return pipeline(4, 8, memory, COSTS, p2p_ms=1.0, **fields)


@pytest.fixture(scope="module")
def found() -> optpipe.Comparison:
    return optpipe.compare(problem(), time_limit_s=100, gap=0.2)


def test_the_shortest_that_fits_comes_first_and_nothing_is_ahead_of_the_solver(found):
    ranks = [0 if row.fits else 1 if row.schedule else 2 for row in found.rows]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2}  # two methods do not apply without recompute_ms
    for rank in (0, 1):
        values = [row.makespan_ms for row, own in zip(found.rows, ranks, strict=True) if own == rank]
        assert values == sorted(values)
    assert found.rows[0].method == "auto"
    names = [(row.method, row.placements) for row in found.rows]
    assert sorted(names) == sorted([*((name, "all") for name in EVERY), ("auto", "keep"), ("auto", "all")])
    kept = found.rows[names.index(("auto", "keep"))]
    for row in found.rows:
        if row.fits and row.schedule.placement is None and row.method != "auto":
            assert row.makespan_ms >= kept.makespan_ms
            assert row.result.lower_bound_ms >= kept.result.lower_bound_ms


def test_each_row_agrees_with_its_schedule(found):
    for row in found.rows:
        if row.schedule is None:
            continue
        placed = row.schedule.problem
        assert placed == (row.schedule.placement.apply(found.problem) if row.schedule.placement else found.problem)
        wrong = check(placed, row.schedule)
        assert row.fits == (wrong == [])
        device, peak = row.peak
        if row.fits:
            assert row.reason is None
            assert peak.bytes <= 15
            assert 0 <= row.gap < 1
            assert row.result.lower_bound_ms <= row.makespan_ms * (1 + 1e-9)
        else:
            assert row.reason == f"device {device} needs {peak.bytes} B and has 15 B"
            assert f"device {device} needs {peak.bytes} B during" in " ".join(wrong)
            assert row.gap is None
        assert row.result.span_ms <= row.makespan_ms


def test_some_methods_do_not_apply_to_the_given_stages():
    told = []
    rows = optpipe.compare(problem(), ["interleaved", "1f1b"], placements="keep", report=told.append).rows
    assert [row.method for row in told] == ["interleaved", "1f1b"]
    assert [row.method for row in rows] == ["1f1b", "interleaved"]
    assert rows[0].reason == "device 0 needs 20 B and has 15 B"
    reason = "interleaved needs 2 or more looped stages a device: the problem has other stages (with all placements "
    assert rows[1].reason == reason + "it is given them)"


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        (["2f2b"], r"method = '2f2b': the methods are auto, naive, "),
        (["gpipe", "tabu"], r"method = 'tabu': the methods are auto, naive, "),
        (["gis:size=5"], r"method = 'gis:size=5': gis has no parameter size \(its parameters: group, leaving\)"),
        (["gpipe 1f1b"], r"compare: methods\[0\] = 'gpipe 1f1b': a method such as 1f1b or gis:group=5 was expected"),
        ([""], r"compare: methods\[0\] = '': a method such as 1f1b"),
        ([], r"compare: methods = a list of 0: a length of at least 1 was expected"),
    ],
)
def test_an_unknown_method_is_one_sentence(methods, told):
    with pytest.raises(InputError, match=f"^{told}"):
        optpipe.compare(problem(), methods)


def test_every_generated_schedule_is_verified(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(solvers.installed(), "COMPARE", "support.fakes.lying_compare_solver")
    small = chain(m=3)
    honest, greedy, *rest = optpipe.compare(small, ["any"]).rows
    assert (honest.method, honest.makespan_ms, honest.result.lower_bound_ms) == (
        "honest",
        one_by_one(small).makespan_ms,
        3,
    )
    assert (greedy.method, greedy.makespan_ms) == ("greedy", gpipe(small).makespan_ms)
    assert greedy.reason == "device 0 needs 3 kB and has 2 kB"
    reasons = {row.method: row.reason for row in rest}
    assert reasons["shy"] == "not for this problem"
    for name, told in (("liar", "0F1 is missing"), ("babbler", "'what?'"), ("stranger", "7F0")):
        assert re.match(f"is no schedule: .*{re.escape(told)}", reasons[name])


def test_host_memory_that_is_too_small_is_the_reason():
    (row,) = optpipe.compare(problem(device={"host_memory_bytes": 4}), ["po-h"]).rows
    peaks = [peak.bytes for peak in row.certificate.host]
    assert row.reason == f"device {peaks.index(max(peaks))} needs {max(peaks)} B of host memory and has 4 B"


def test_engines_run_where_they_are_named(monkeypatch):
    """Each search has the options; with all placements there are two of each."""
    asked = []

    def search(problem: Problem, options: SolveOptions, start: Schedule | None) -> list[Result]:
        asked.append(options.arguments())
        return [Result.from_schedule(one_by_one(problem), CompareOptions(), 1.0)]

    monkeypatch.setattr(comparison, "search", search)
    options = {"threads": 3, "seed": 4, "solver": "highs", "memory_mib": 512, "time_limit_s": 5.0}
    found = optpipe.compare(chain(m=3), ["milp", "auto"], **options)
    named = [(each["method"], each["placements"]) for each in asked]
    assert named == [("auto", "keep"), ("auto", "all"), ("milp", "keep"), ("milp", "all")]
    assert all(options.items() <= each.items() for each in asked)
    assert {row.method for row in found.rows} == {"auto", "milp"}


def test_a_search_ends_no_longer_than_what_it_starts_from(monkeypatch):
    asked = []

    def search(posed, options, start):
        asked.append(start)
        return [Result("unknown", reason="no time was left")]

    monkeypatch.setattr(comparison, "search", search)
    short, long, too_large = gpipe(chain(m=2)), one_by_one(chain(m=2)), gpipe(chain(m=4))
    found = comparison.solve_from([long, short, too_large], chain(memory=9, m=2), SolveOptions())
    assert (found.status, found.makespan_ms) == ("feasible", short.makespan_ms)
    assert found.schedule is asked[0]
    assert found.schedule.problem == chain(memory=9, m=2)
    assert comparison.solve_from([too_large], chain(m=2), SolveOptions()).schedule is None


def test_what_is_compared_is_the_objective():
    rows = optpipe.compare(problem(memory=100), ["gpipe", "1f1b", "zb-h1"], placements="keep", objective="span").rows
    assert [row.result.value_ms for row in rows] == sorted(row.result.span_ms for row in rows)
