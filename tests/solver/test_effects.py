"""Heuristics, bounds, the least memory and every model read the one table of effects: they hold for others, too."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from support.examples import examples
from support.oracles.bounds import cpsat_frames, read_frames
from support.oracles.effects import TABLES, effects
from support.oracles.enumeration import EXHAUSTIVE, RICHER, best_of_all, problem_of, programs_of
from support.oracles.enumeration import stage as numbered
from support.oracles.milp import Solver
from support.problems import pipeline, stage, with_budgets
from support.problems.strategies import problems

from optpipe import Kind, Problem, Schedule, certify, check
from optpipe.evaluate.effects import TABLE
from optpipe.evaluate.objective import Objective
from optpipe.model.ops import Effect
from optpipe.process.protocol import Programs
from optpipe.reuse import repair
from optpipe_solver.bounds import lower_bound, memory_bound, trivial_bound
from optpipe_solver.bounds.any_partition import no_partition_fits, partition_bound
from optpipe_solver.bounds.least_memory import infeasibility, least_memory
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.methods import HEURISTICS

MORE = 2  # bytes


def with_workspace(kind: Kind) -> dict[Kind, Effect]:
    """An op needs more while it runs."""
    rule = TABLE[kind]
    return {kind: replace(rule, takes=lambda x: rule.takes(x) + MORE, frees=lambda x: rule.frees(x) + MORE)}


CHANGES = {
    "nothing": dict[Kind, Effect](),
    **TABLES,
    "F needs a workspace": with_workspace(Kind.F),
    "C needs a workspace": with_workspace(Kind.C),
    "all backwards need a workspace": with_workspace(Kind.BW) | with_workspace(Kind.B),
}


@pytest.fixture(params=CHANGES)
def _changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, effect in CHANGES[request.param].items():
        monkeypatch.setitem(TABLE, kind, effect)


@pytest.mark.usefixtures("_changed")
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(max_stages=4, max_microbatches=4))
def test_every_heuristic_fits_with_the_least_memory_and_no_bound_is_above_it(problem: Problem) -> None:
    tight = with_budgets(problem, least_memory(problem))
    assert infeasibility(tight) is None
    for name in HEURISTICS:
        for schedule in islice(STREAMS[name](tight, "makespan"), 4):
            assert check(tight, schedule) == []
        for schedule in islice(STREAMS[name](problem, "makespan"), 4):
            peaks = [peak.bytes for peak in certify(problem, schedule).device]
            assert all(needed <= peak for needed, peak in zip(least_memory(problem), peaks, strict=True))
            assert memory_bound(with_budgets(problem, peaks)) <= schedule.makespan_ms + 1e-6


ONE_DEVICE = {
    "two stages": [stage(sizes=(4, 1)), stage(sizes=(3, 2))],
    "little is saved": [stage(sizes=(4, 0)), stage(sizes=(3, 5))],
    "one offloads": [stage(sizes=(4, 1), offload=(1, 1, 3)), stage(sizes=(3, 1))],
    "one recomputes": [stage(sizes=(4, 1), recompute=(1, 1)), stage(sizes=(3, 2))],
}


@pytest.mark.usefixtures("_changed")
@pytest.mark.parametrize("name", ONE_DEVICE)
def test_the_least_memory_is_what_trying_all_programs_finds(name: str) -> None:
    problem = pipeline(1, 1, 100, [{**costs, "device": 0} for costs in ONE_DEVICE[name]])
    (needed,) = least_memory(problem)
    for budget, suffices in ((needed, True), (needed - 1, False)):
        tight = with_budgets(problem, [budget])
        assert any(check(tight, Schedule(tight, (program,))) == [] for program in programs_of(tight, 0)) == suffices


@pytest.mark.usefixtures("_changed")
@pytest.mark.parametrize(
    "name", ["both offload", "two chunks", "two directions", "recompute", "recompute or offload", "only BW fits"]
)
def test_bounds_are_no_more_than_the_best_of_all_schedules(name: str) -> None:
    problem = (EXHAUSTIVE | RICHER)[name]
    for objective in ("makespan", "span"):
        shortest_ms = best_of_all(problem, objective)[0]
        assert trivial_bound(problem, objective) <= shortest_ms + 1e-9
        assert memory_bound(problem, objective) <= shortest_ms + 1e-9
    if infeasibility(problem):
        assert shortest_ms == float("inf")


@pytest.mark.usefixtures("_changed")
@pytest.mark.parametrize("budget", [10, 12, 16])
def test_bounds_on_all_partitions_hold_for_those_of_single_layers(budget: int) -> None:
    layers = [stage((2, 2, 1), (8, 3), offload=(3, 3, 8)), stage((1, 2, 1), (8, 2), recompute=(1, 2))]
    problem = pipeline(2, 3, budget, layers).replace(layers=layers)
    for schedule in islice(STREAMS["adaoffload"](problem, "makespan"), 10):
        assert no_partition_fits(problem) is None
        assert partition_bound(problem) <= schedule.makespan_ms + 1e-6


PROBLEMS = {
    "offload": problem_of([numbered(0, (2, 3, 1), 2, 1, (2, 2, 2)), numbered(1, (3, 2, 2), 1)], [99, 99], 2, 3.0),
    "recompute": problem_of([numbered(0, (2, 2, 1), 3, 1, None, (2, 1)), numbered(1, (2, 3, 1), 1)], [99, 99], 2),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the table that is in place."""
    name: str = request.param
    with effects(name):
        yield name


def one_after_the_other(problem: Problem) -> Schedule:
    programs = [[f"{s}{kind}{j}" for j in range(problem.microbatches) for kind in "FBW"] for s in range(2)]
    return Schedule.parse(problem, programs)


def tight(problem: Problem) -> Problem:
    """The problem with memory for one micro-batch after the other, and no more, by the table that is in place."""
    return with_budgets(problem, [peak.bytes for peak in certify(problem, one_after_the_other(problem)).device])


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", PROBLEMS)
def test_cp_sat_proves_the_best_of_all_programs(name: str) -> None:
    problem = tight(PROBLEMS[name])
    best, tried = best_of_all(problem, "makespan")
    start = one_after_the_other(problem)
    assert check(problem, start) == []
    schedules, bound = read_frames(problem, cpsat_frames(problem, warm_start=Programs.from_schedule(start)))
    assert tried > 10
    assert all(certify(problem, schedule).fits for schedule in schedules)
    assert min(schedule.makespan_ms for schedule in [start, *schedules]) == pytest.approx(best)
    # The first one is where the engine begins.
    assert max(lower_bound(problem), bound) == pytest.approx(best)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("name", PROBLEMS)
def test_repair_makes_a_schedule_fit(name: str) -> None:
    ample, problem = PROBLEMS[name], tight(PROBLEMS[name])
    schedule = Schedule.parse(ample, [[f"{s}{op}" for op in ("F0", "B0", "F1", "W0", "B1", "W1")] for s in range(2)])
    assert check(ample, schedule) == []
    repaired = repair(problem, schedule)
    assert repaired
    assert certify(problem, repaired).fits


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_milp_finds_the_best_of_all_programs(solver: Solver, table: str, objective: Objective) -> None:
    problem = tight(PROBLEMS["offload"])
    best, _ = best_of_all(problem, objective)
    values, bound = solver.solve(problem, objective, table=table)
    assert values[-1] == pytest.approx(best)
    assert bound <= best + 1e-9
