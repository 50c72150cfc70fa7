"""Every model reads the one table of effects: with other entries in it, what is found fits by the certificate, and the
optimum is that of all programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.effects import TABLES, effects
from support.enumeration import best_of_all, problem_of, stage

from optpipe import Problem, Schedule, certify, check
from optpipe.process.protocol import Bound, Frame, Incumbent, Programs, Request
from optpipe.reuse.repair import repair
from optpipe_solver import cpsat
from optpipe_solver.bounds import memory_bound, trivial_bound

PROBLEMS = {
    "offload": problem_of([stage(0, (2, 3, 1), 2, 1, (2, 2, 2)), stage(1, (3, 2, 2), 1)], [99, 99], 2, 3.0),
    "recompute": problem_of([stage(0, (2, 2, 1), 3, 1, None, (2, 1)), stage(1, (2, 3, 1), 1)], [99, 99], 2),
}
# In a process of its own, as highspy cannot be loaded beside ortools. The start must satisfy every row, so that no
# memory is counted twice, and all that is found must fit, so that none is left out.
MILP = """
import json, sys, time
from itertools import pairwise
import numpy as np
from support.effects import effects
from optpipe import Problem, Schedule, check
from optpipe.lift import lift
from optpipe_solver.milp.backend import minimize
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.task import Limits, Task
with effects(sys.argv[1]):
    problem = Problem.from_dict(json.loads(sys.argv[2]))
    programs = [[f"{s}{kind}{j}" for j in range(2) for kind in "FBW"] for s in range(2)]
    schedule = Schedule.parse(problem, programs)
    assert check(problem, schedule) == []
    model = Model(problem, "makespan", schedule.makespan_ms, Switches(order="entry"))
    given, x = assignment(model.variables, schedule), np.array(model.rows.lower)
    x[list(given)] = list(given.values())
    x = model.rows.earliest(x)
    begins, index, value = model.rows.matrix()
    sums = np.array([value[a:b] @ x[index[a:b]] for a, b in pairwise(begins)])
    assert (sums >= np.array(model.rows.at_least) - 1e-7).all()
    found = []
    def take(x):
        found.append(lift(problem, model.starts(x)))
        assert check(problem, found[-1]) == []
    limits = Limits(time.monotonic() + 60, 1, 0)
    minimize("highs", Task(model.rows, model.C, given, limits, take, lambda bound: None), sys.exit)
    print(min(schedule.makespan_ms for schedule in found))
"""


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
    cpsat.ENGINE.run(request, frames.append)
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


@pytest.mark.parametrize("name", TABLES)
def test_the_milp_finds_schedules_that_fit(name: str) -> None:
    with effects(name):
        problem = tight(PROBLEMS["offload"])
        best, _ = best_of_all(problem, "makespan")
        slow = one_after_the_other(problem).makespan_ms
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", MILP, name, json.dumps(problem.to_dict())]
    found = float(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True).stdout)
    assert best - 1e-6 <= found < slow
