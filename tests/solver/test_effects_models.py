"""Every model reads the one table of effects: with other entries in it, what is found fits by the certificate, and the
optimum is that of all programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.oracles.effects import TABLES, effects
from support.oracles.enumeration import best_of_all, problem_of, stage
from support.oracles.milp import Solver, solver_process

from optpipe import Problem, Schedule, certify, check
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import Bound, Frame, Incumbent, Programs, Request
from optpipe.reuse import repair
from optpipe_solver import cpsat
from optpipe_solver.bounds import memory_bound, trivial_bound

PROBLEMS = {
    "offload": problem_of([stage(0, (2, 3, 1), 2, 1, (2, 2, 2)), stage(1, (3, 2, 2), 1)], [99, 99], 2, 3.0),
    "recompute": problem_of([stage(0, (2, 2, 1), 3, 1, None, (2, 1)), stage(1, (2, 3, 1), 1)], [99, 99], 2),
}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


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
    peaks = certify(problem, one_after_the_other(problem)).device
    return problem.replace(devices=[{"activation_budget_bytes": peak.bytes} for peak in peaks])


@pytest.mark.parametrize("name", PROBLEMS)
def test_cp_sat_proves_the_best_of_all_programs(table: str, name: str) -> None:
    problem = tight(PROBLEMS[name])
    best, tried = best_of_all(problem, "makespan")
    start = one_after_the_other(problem)
    assert check(problem, start) == []
    frames: list[Frame] = []
    request = Request(problem=problem, method="cpsat", time_limit_s=60, warm_start=Programs.from_schedule(start))
    cpsat.run(request, frames.append)
    found = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    bounds = [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]
    assert tried > 10
    assert all(certify(problem, schedule).fits for schedule in found)
    assert min(schedule.makespan_ms for schedule in [start, *found]) == pytest.approx(best)
    known = [trivial_bound(problem), memory_bound(problem)]  # where the engine begins
    assert max([*known, *bounds]) == pytest.approx(best)


@pytest.mark.parametrize("name", PROBLEMS)
def test_repair_makes_a_schedule_fit(table: str, name: str) -> None:
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
