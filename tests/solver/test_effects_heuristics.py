"""Heuristics, bounds and the least memory follow the table of effects: they hold for other entries of it, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from support.examples import examples
from support.oracles.effects import TABLES
from support.oracles.enumeration import EXHAUSTIVE, RICHER, best_of_all, programs_of
from support.problems import pipeline, stage
from support.problems.strategies import problems

from optpipe import Kind, Problem, Schedule, certify, check
from optpipe.evaluate.effects import TABLE
from optpipe.model.ops import Effect
from optpipe_solver.bounds import memory_bound, trivial_bound
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


@pytest.fixture(params=CHANGES, autouse=True)
def changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, effect in CHANGES[request.param].items():
        monkeypatch.setitem(TABLE, kind, effect)


def with_budgets(problem: Problem, budgets: list[int]) -> Problem:
    devices = [device.model_dump(exclude_none=True) for device in problem.devices]
    for device, budget in zip(devices, budgets, strict=True):
        device["activation_budget_bytes"] = budget
    return problem.replace(devices=devices)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(max_stages=4, max_microbatches=4))
def test_every_heuristic_fits_with_the_least_memory(problem: Problem) -> None:
    tight = with_budgets(problem, least_memory(problem))
    assert infeasibility(tight) is None
    for name in HEURISTICS:
        for schedule in islice(STREAMS[name](tight, "makespan"), 4):
            assert check(tight, schedule) == []


ONE_DEVICE = {
    "two stages": [stage(sizes=(4, 1)), stage(sizes=(3, 2))],
    "little is saved": [stage(sizes=(4, 0)), stage(sizes=(3, 5))],
    "one offloads": [stage(sizes=(4, 1), offload=(1, 1, 3)), stage(sizes=(3, 1))],
    "one recomputes": [stage(sizes=(4, 1), recompute=(1, 1)), stage(sizes=(3, 2))],
}


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_the_least_memory_is_what_trying_all_programs_finds(name: str) -> None:
    problem = pipeline(1, 1, 100, [{**costs, "device": 0} for costs in ONE_DEVICE[name]])
    (needed,) = least_memory(problem)
    assert has_a_schedule(with_budgets(problem, [needed]))
    assert not has_a_schedule(with_budgets(problem, [needed - 1]))


def has_a_schedule(problem: Problem) -> bool:
    return any(check(problem, Schedule(problem, (program,))) == [] for program in programs_of(problem, 0))


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


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(max_stages=4, max_microbatches=4))
def test_bounds_are_no_more_than_what_heuristics_need(problem: Problem) -> None:
    for name in HEURISTICS:
        for schedule in islice(STREAMS[name](problem, "makespan"), 4):
            peaks = [peak.bytes for peak in certify(problem, schedule).device]
            tight = with_budgets(problem, peaks)
            assert all(needed <= peak for needed, peak in zip(least_memory(problem), peaks, strict=True))
            assert memory_bound(tight) <= schedule.makespan_ms + 1e-6


@pytest.mark.parametrize("budget", [10, 12, 16])
def test_bounds_on_all_partitions_hold_for_those_of_single_layers(budget: int) -> None:
    layers = [stage((2, 2, 1), (8, 3), offload=(3, 3, 8)), stage((1, 2, 1), (8, 2), recompute=(1, 2))]
    problem = pipeline(2, 3, budget, layers).replace(layers=layers)
    for schedule in islice(STREAMS["adaoffload"](problem, "makespan"), 10):
        assert no_partition_fits(problem) is None
        assert partition_bound(problem) <= schedule.makespan_ms + 1e-6
