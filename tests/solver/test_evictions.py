"""Evictions to peers, which `milp` does not make, and optimizers on the host, which no engine makes: nothing of the
solver or the cache breaks them, forgets them or claims what they disprove."""

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import bounds, schedules
from support.oracles.bounds import bounds_of, cpsat_finds
from support.oracles.enumeration import TooManyError, best_of_all
from support.problems import with_budgets
from support.problems.small import evicting_and_tiny
from support.problems.strategies import problems_with_schedules
from support.problems.units import ACTIVATION, units

from optpipe import Kind, Problem, Schedule, Stage, check, simulate
from optpipe.dispatch.descents import descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import length_ms
from optpipe.lift import lift, prune
from optpipe.process.protocol import Infeasible, Programs, Request
from optpipe.reuse import repair
from optpipe_cache import Cache, features
from optpipe_cache.features import structure
from optpipe_solver import dispatch, milp
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.bounds.problem_facts import without_evictions
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import Grid, is_expressible, place_on_grid, split_dispensable
from optpipe_solver.cpsat.model import WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.portfolio import PlacementSearch, Portfolio
from optpipe_solver.schedule_facts import allocation_times, has_only_known_ops, tails
from optpipe_solver.systems import generate


def paired(memory: int, m: int = 2, **changes: Any) -> Problem:
    """Two devices; the first may evict to the second."""
    first, last = units(2, m).stages
    first = first.model_copy(update={"evict_ms": 0.25, "load_ms": 0.25, "evict_bytes": ACTIVATION})
    devices = [{"activation_budget_bytes": memory, "peer": 1}, {"activation_budget_bytes": 3 * ACTIVATION}]
    return units(2, m).replace(stages=[first, last], devices=devices, **changes)


def evicting(problem: Problem) -> Schedule:
    """The first activation leaves before the second forward, which one activation of memory does not allow
    otherwise."""
    first, second = "0F0 0E0 0D0 0F1 0BW1 0L0 0BW0", "0A0 1F0 1F1 1BW1 1BW0 0V0"
    return Schedule.parse(problem, [first.split(), second.split()], method="by hand")


@settings(max_examples=examples(60), deadline=None)
@given(problems_with_schedules(beyond=True))
def test_what_works_on_schedules_keeps_them_valid(pair):
    problem, schedule = pair
    for changed in (prune(schedule), repair(problem, schedule)):
        assert check(problem, changed) == []
    if problem.overlap_factor is None:
        assert max(tails(schedule)) == pytest.approx(schedule.makespan_ms)
    assert (allocation_times(schedule.timeline) <= schedule.timeline.start).all()
    assert has_only_known_ops(schedule) == (
        not any(op.kind.name in "GUP" for program in schedule.programs for op in program.ops())
    )
    assert has_only_known_ops(schedule) or not is_expressible(schedule)


def test_no_bound_and_no_infeasibility_is_claimed_that_evictions_disprove():
    problem = paired(ACTIVATION)
    schedule = evicting(problem)
    assert check(problem, schedule) == []
    plain = with_budgets(units(2, 2), [ACTIVATION, 3 * ACTIVATION])
    assert memory_bound(plain) == 10.0  # one micro-batch at a time
    assert memory_bound(problem) <= schedule.makespan_ms == 9.5
    assert infeasibility(problem) is None
    assert milp.unsupported(problem) == "the model has no evictions"


def test_cp_sat_evicts_where_that_pays():
    """It begins with one micro-batch at a time."""
    problem, clock = paired(ACTIVATION), Clock(60.0, counts=True)
    plain = with_budgets(units(2, 2), [ACTIVATION, 3 * ACTIVATION])
    for each, shortest_ms in ((plain, 10.0), (problem, 7.25)):
        assert best_of_all(each, "makespan")[0] == shortest_ms
        grid, start = Grid.for_problem(each), next(STREAMS["naive"](each, "makespan"))
        incumbent = place_on_grid(grid, split_dispensable(start))
        answer = WindowModel(grid, incumbent, Window.of_all(incumbent), in_order=False).solve(clock, 1, 0)
        assert answer.proven
        assert grid.ms(answer.value) == shortest_ms
        found = lift(each, grid.starts_ms(answer.starts))
        assert check(each, found) == []
        assert found.makespan_ms == shortest_ms
        assert any(op.kind is Kind.E for op in answer.starts) == (each is problem)


@settings(max_examples=examples(60), deadline=None)
@given(evicting_and_tiny(), st.sampled_from(("makespan", "span")))
def test_no_bound_is_above_the_best_schedule_with_evictions_and_none_that_is_listed_below(problem, objective):
    try:
        best_ms, _ = best_of_all(problem, objective)
    except TooManyError:
        reject()
    assert {name: ms for name, ms in bounds_of(problem, objective).items() if ms > best_ms + 1e-6} == {}
    simulator = Simulator(problem)
    for step in islice(descents(simulator, objective, seed=0), 40):
        if schedule := simulator.schedule(step.rules, "dispatch", step.listed):
            assert check(problem, schedule) == []
            assert length_ms(schedule, objective) >= best_ms - 1e-6
    found, bound_ms = cpsat_finds(problem, objective, 5.0)
    assert bound_ms <= best_ms + 1e-6
    assert all(check(problem, schedule) == [] for schedule in found)
    assert length_ms(found[-1], objective) >= best_ms - 1e-6  # a tick more where ops take no time


def test_a_bound_counts_the_room_on_the_peer_and_the_link():
    """Each activation of 20 may leave, but there is no place for them beside the peer's own; or there is, and the link
    is slow."""
    row = units(2, 20)
    first = row.stages[0].model_copy(update={"evict_ms": 0.0, "load_ms": 0.0, "evict_bytes": ACTIVATION})
    slow = first.model_copy(update={"evict_ms": 10.0, "load_ms": 10.0})

    def bound_ms(stage: Stage, rooms: int) -> float:
        devices = [
            {"activation_budget_bytes": ACTIVATION, "peer": 1},
            {"activation_budget_bytes": rooms * ACTIVATION},
        ]
        problem = row.replace(stages=[stage, row.stages[1]], p2p_ms=20.0, devices=devices)
        assert memory_bound(without_evictions(problem)) < 125.0
        return memory_bound(problem)

    assert bound_ms(first, 60) < 125.0
    assert bound_ms(first, 2) > 200.0
    assert bound_ms(slow, 60) > 200.0


def test_list_scheduling_evicts_where_that_pays():
    """As BPipe does, where memory is balanced but 1F1B's need of it is not; and where no published schedule applies."""
    limit = 5 * ACTIVATION
    row = units(8, 24)
    eviction = {"evict_ms": 0.5, "load_ms": 0.5, "evict_bytes": ACTIVATION}
    problem = row.replace(
        devices=[{"activation_budget_bytes": limit, "peer": 7 - d} for d in range(8)],
        stages=[stage.model_copy(update=eviction) for stage in row.stages],
    )
    plain = with_budgets(row, [limit] * 8)
    frames: dict[bool, list[Any]] = {True: [], False: []}
    for evicts, each in ((True, problem), (False, plain)):
        dispatch.run(Request(problem=each, method="dispatch", time_limit_s=2.0, threads=1), frames[evicts].append)
    shortest = schedules(frames[True], problem)[-1]
    assert check(problem, shortest) == []
    assert any(op.kind is Kind.E for program in shortest.programs for op in program.ops())
    assert shortest.makespan_ms < schedules(frames[False], plain)[-1].makespan_ms
    assert shortest.makespan_ms <= generate("bpipe", problem).makespan_ms


@pytest.mark.parametrize("search", [Portfolio, PlacementSearch])
def test_a_search_keeps_an_eviction_that_is_the_best_it_knows(search):
    problem = paired(ACTIVATION)
    heard: list[Any] = []
    request = Request(problem=problem, time_limit_s=2.0, warm_start=Programs.from_schedule(evicting(problem)))
    search(request, heard.append).run()
    best = min(schedules(heard, problem), key=lambda schedule: schedule.makespan_ms)
    assert best.makespan_ms <= evicting(problem).makespan_ms
    assert check(best.problem, best) == []
    assert max(bounds(heard)) <= best.makespan_ms + 1e-9
    assert not any(isinstance(frame, Infeasible) for frame in heard)


def test_repair_keeps_what_is_evicted_and_gives_up_where_that_is_not_possible_any_more():
    schedule = evicting(paired(ACTIVATION))
    slower = paired(ACTIVATION, p2p_ms=2.0)
    found = repair(slower, schedule)
    assert found.programs == schedule.programs
    assert repair(paired(3 * ACTIVATION).replace(stages=units(2, 2).stages), schedule) is None


def test_the_cache_tells_them_apart(tmp_path):
    problem = paired(ACTIVATION)
    plain = problem.replace(stages=units(2, 2).stages)
    assert structure(plain) == structure(units(2, 2)) != structure(problem)
    cache = Cache(tmp_path / "cache.db")
    cache.add(evicting(problem), "feasible")
    assert cache.lookup(plain) is None
    slower = paired(ACTIVATION, p2p_ms=0.1)
    hit = cache.lookup(slower)
    assert check(slower, hit.schedule) == []
    assert hit.schedule.makespan_ms <= simulate(slower, evicting(slower)).makespan_ms
    costly = problem.replace(stages=[problem.stages[0].model_copy(update={"evict_ms": 1.0}), problem.stages[1]])
    assert list(features(problem).terms(features(costly))) == ["evict"]
