"""PuLP: CBC, which comes with it, and any other solver that it finds. Solutions and bounds come at the end only."""

from __future__ import annotations

import inspect
import time

import numpy as np
import pulp

from optpipe_solver.methods import usual_name
from optpipe_solver.milp.rows import Rows
from optpipe_solver.milp.task import TOLERANCE, Limits, Minimize, Outcome, Task, UnavailableError

SHARE = 0.9  # of the time is the solver's: its solution comes at its end, and must come in time
NEARLY = 0.9  # of its time is used by a solver that stops at its limit: CBC does so a little before
CBC = ("PULP_CBC_CMD", "COIN_CMD")
# An optimum is lowered by that to be a bound: a solver that ignores the gap asked for stops at 1e-4.
MARGIN = 2e-4


def find_solver(name: str) -> Minimize:
    """The backend for PuLP's solver of that name, however it is written, for CBC if it is empty.

    Raises UnavailableError.
    """
    wanted = usual_name(name or "cbc")
    alike = sorted((each for each in pulp.listSolvers() if usual_name(each) == wanted), key=lambda each: each != name)
    for chosen in CBC if wanted == "cbc" else alike:
        if pulp.getSolver(chosen, msg=False).available():
            return lambda task: _minimize(chosen, task)
    available = ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
    raise UnavailableError(f"solver = 'pulp:{name or CBC[0]}': PuLP does not find this solver; it finds {available}")


def _minimize(name: str, task: Task) -> Outcome:
    shown = f"PuLP's {name}"
    task.on_start(shown)
    problem, variables = _program(task.rows, task.objective)
    if task.start:
        x = np.array(task.rows.lower)
        x[list(task.start)] = list(task.start.values())
        for variable, value in zip(variables, task.rows.earliest(x).tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    began, seconds = time.monotonic(), SHARE * task.limits.seconds
    try:
        problem.solve(_solver(name, seconds, task.limits, warm=bool(task.start)))
    except Exception as error:  # PuLP lets through what a solver's own library raises
        raise UnavailableError(f"PuLP's {name} failed: {error}") from None
    used_its_time = time.monotonic() - began >= NEARLY * seconds
    match problem.sol_status:
        case pulp.LpSolutionOptimal:
            x = np.array([variable.value() or 0.0 for variable in variables])
            optimum = float(x[task.objective])
            task.on_solution(x)
            task.on_bound(optimum * (1 - MARGIN))
            return Outcome(shown, "optimal", optimum)
        case pulp.LpSolutionIntegerFeasible:  # its only limit is the time: there was none to prove it
            task.on_solution(np.array([variable.value() or 0.0 for variable in variables]))
            return Outcome(shown, "time is up")
        case pulp.LpSolutionInfeasible if not used_its_time:
            return Outcome(shown, "infeasible")
    return Outcome(shown, "time is up" if used_its_time else "ended")


def _solver(name: str, seconds: float, limits: Limits, warm: bool) -> pulp.LpSolver:
    """PuLP's solver with those of the limits that PuLP can pass on to it."""
    options: dict[str, object] = {
        "msg": False,
        "timeLimit": seconds,
        "threads": limits.threads,
        "gapRel": 0.0,
        "warmStart": warm,
    }
    if name in CBC:
        seed = [f"randomSeed {limits.seed}", f"randomCbcSeed {limits.seed}"]
        options["options"] = [f"primalTolerance {TOLERANCE}", f"integerTolerance {TOLERANCE}", *seed]
    parameters = inspect.signature(type(pulp.getSolver(name)).__init__).parameters
    return pulp.getSolver(name, **{option: value for option, value in options.items() if option in parameters})


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
