"""Evictions to peers and optimizers on the host, which no engine makes: nothing of the solver or the cache breaks them,
forgets them or claims what they disprove."""

from typing import Any

import pytest
from hypothesis import given, settings
from support.examples import examples
from support.frames import bounds, notes, schedules
from support.problems import with_budgets
from support.problems.strategies import problems_with_schedules
from support.problems.units import ACTIVATION, units

from optpipe import Problem, Schedule, check, simulate
from optpipe.lift import prune
from optpipe.process.protocol import Infeasible, Programs, Request
from optpipe.reuse import repair
from optpipe_cache import Cache, features
from optpipe_cache.features import structure
from optpipe_solver import cpsat, milp
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.cpsat.grid import is_expressible
from optpipe_solver.portfolio import PlacementSearch, Portfolio
from optpipe_solver.schedule_facts import allocation_times, has_only_known_ops, tails


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
        not any(op.kind.name in "ELAVGUP" for program in schedule.programs for op in program.ops())
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
    assert cpsat.unsupported(problem) == "the model has no evictions"
    assert milp.unsupported(problem) == "the model has no evictions"


def test_an_engine_asked_for_by_name_says_that_it_makes_none():
    frames = []
    assert Portfolio(Request(problem=paired(ACTIVATION), method="lns"), frames.append).supports("lns")
    assert notes(frames) == ["lns makes no evictions: some heuristics and published schedules do"]


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
    assert hit.schedule.makespan_ms == simulate(slower, evicting(slower)).makespan_ms
    costly = problem.replace(stages=[problem.stages[0].model_copy(update={"evict_ms": 1.0}), problem.stages[1]])
    assert list(features(problem).terms(features(costly))) == ["evict"]
