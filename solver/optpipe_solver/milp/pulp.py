"""PuLP: CBC, which comes with it, and any other solver that it finds. Solutions and bounds come at the end only."""

from __future__ import annotations

import inspect
import time
from typing import NamedTuple

import numpy as np
import pulp

from optpipe.model.arrays import Floats
from optpipe.options import usual_name
from optpipe_solver.milp.rows import Rows
from optpipe_solver.milp.task import TOLERANCE, Limits, Minimize, Outcome, Task, UnavailableError, cut_at_root

SHARE = 0.9  # of the time is the solver's: its solution comes at its end, and must come in time
NEARLY = 0.9  # of its time is used by a solver that stops at its limit: CBC does so a little before
CBC = ("PULP_CBC_CMD", "COIN_CMD")
# An optimum is lowered by that to be a bound: a solver that ignores the gap asked for stops at 1e-4.
MARGIN = 2e-4


def solver(name: str) -> Minimize:
    """The backend for PuLP's solver of that name, however it is written, for CBC if it is empty.

    Raises UnavailableError.
    """
    asked = usual_name(name or "cbc")
    named = sorted((found for found in pulp.listSolvers() if usual_name(found) == asked), key=lambda x: x != name)
    for chosen in CBC if asked == "cbc" else named:
        if pulp.getSolver(chosen, msg=False).available():
            return lambda task: _minimize(chosen, task)
    found = ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
    raise UnavailableError(f"solver = 'pulp:{name or CBC[0]}': PuLP does not find this solver; it finds {found}")


def _minimize(name: str, task: Task) -> Outcome:
    shown = f"PuLP's {name}"
    task.on_start(shown)
    cut_at_root(task, lambda: _solve(name, task, relaxed=True).x)
    found = _solve(name, task, relaxed=False)
    if found.x is not None:
        task.on_solution(found.x)
        if found.proven:
            task.on_bound(float(found.x[task.objective]) * (1 - MARGIN))
            return Outcome(shown, "optimal", float(found.x[task.objective]))
    return Outcome(shown, "time is up" if found.used_its_time else "infeasible" if found.infeasible else "ended")


class _Found(NamedTuple):
    x: Floats | None  # (variables,), if any
    proven: bool  # whether it is said to be optimal
    infeasible: bool  # likewise
    used_its_time: bool  # its share of the time; the rest is for what comes behind it


def _solve(name: str, task: Task, relaxed: bool) -> _Found:
    problem, variables = _program(task.rows, task.objective)
    if task.start and not relaxed:
        x = np.array(task.rows.lower)
        x[list(task.start)] = list(task.start.values())
        for variable, value in zip(variables, task.rows.earliest(x).tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    began, seconds = time.monotonic(), SHARE * task.limits.seconds
    try:
        problem.solve(_solver(name, seconds, task.limits, relaxed, warm=bool(task.start)))
    except Exception as error:  # PuLP lets through what a solver's own library raises
        raise UnavailableError(f"PuLP's {name} failed: {error}") from None
    any_found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    values = np.array([v.value() or 0.0 for v in variables]) if any_found else None
    proven, infeasible = (problem.sol_status == pulp.LpSolutionOptimal, problem.sol_status == pulp.LpSolutionInfeasible)
    # Its only limit is the time: what it has found and not proven it had no time to prove.
    unproven = problem.sol_status == pulp.LpSolutionIntegerFeasible
    out_of_time = unproven or time.monotonic() - began >= NEARLY * seconds
    return _Found(values, proven, infeasible, out_of_time)


def _solver(name: str, seconds: float, limits: Limits, relaxed: bool, warm: bool) -> pulp.LpSolver:
    """PuLP's solver with those of the limits that PuLP can pass on to it."""
    asked: dict[str, object] = {
        "msg": False,
        "mip": not relaxed,
        "timeLimit": seconds,
        "threads": limits.threads,
        "gapRel": 0.0,
    }
    asked |= {"warmStart": warm and not relaxed}
    if name in CBC:
        seed = [f"randomSeed {limits.seed}", f"randomCbcSeed {limits.seed}"]
        asked |= {"options": [f"primalTolerance {TOLERANCE}", f"integerTolerance {TOLERANCE}", *seed]}
    takes = inspect.signature(type(pulp.getSolver(name)).__init__).parameters
    return pulp.getSolver(name, **{option: value for option, value in asked.items() if option in takes})


def _program(rows: Rows, objective: int) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    problem = pulp.LpProblem("optpipe", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"x{k}", low, high, pulp.LpInteger if whole else pulp.LpContinuous)
        for k, (low, high, whole) in enumerate(zip(rows.lower, rows.upper, rows.whole, strict=True))
    ]
    problem += variables[objective]
    for index, value, at_least in rows.each():
        problem += pulp.LpAffineExpression(zip((variables[var] for var in index), value, strict=True)) >= at_least
    return problem, variables
