"""Gurobi: incumbents and bounds by callback, and a MIP start. The licence that comes with gurobipy is for 2,000
variables and rows."""

from __future__ import annotations

from functools import cache

import gurobipy as gp
import numpy as np
from gurobipy import GRB

from optpipe_solver.milp.rows import Rows
from optpipe_solver.milp.task import MARGIN, TOLERANCE, Limits, Outcome, Status, Task, UnavailableError

NAME = "Gurobi"
PIP_SIZE = 2000
ENDINGS: dict[int, Status] = {
    GRB.OPTIMAL: "optimal",
    GRB.INFEASIBLE: "infeasible",
    GRB.INF_OR_UNBD: "infeasible",
    GRB.TIME_LIMIT: "time is up",
}


@cache
def licensed() -> bool:
    """Whether there is a licence for larger models than that of gurobipy."""
    try:
        with gp.Env(params={"OutputFlag": 0}) as env, gp.Model(env=env) as model:
            model.addVars(PIP_SIZE + 1)
            model.optimize()
    except gp.GurobiError:
        return False
    return True


def minimize(task: Task) -> Outcome:
    """Minimizes with Gurobi."""
    task.on_start(NAME)
    try:
        with gp.Env(params=_params(task.limits)) as env, gp.Model(env=env) as model:
            return _run(model, task)
    except gp.GurobiError as error:
        if error.errno == GRB.Error.SIZE_LIMIT_EXCEEDED:
            size = f"{len(task.rows.lower)} variables and {len(task.rows.at_least)} rows"
            raise UnavailableError(
                f"Gurobi has no licence for this model of {size}, the one of pip being for {PIP_SIZE} of each"
            ) from None
        raise UnavailableError(f"Gurobi failed: {error}") from None


def _run(model: gp.Model, task: Task) -> Outcome:
    variables, best = _fill(model, task.rows), -np.inf
    model.setObjective(variables[task.objective], GRB.MINIMIZE)
    for var, value in task.start.items():
        variables[var].Start = value

    def bound(value: float) -> None:
        nonlocal best
        if best < value < GRB.INFINITY:
            best = value
            task.on_bound(value * (1 - MARGIN))

    def callback(model: gp.Model, where: int) -> None:
        if where == GRB.Callback.MIPSOL:
            task.on_solution(np.array(model.cbGetSolution(variables)))
        elif where == GRB.Callback.MIP:
            bound(model.cbGet(GRB.Callback.MIP_OBJBND))

    model.optimize(callback)
    if model.SolCount:
        task.on_solution(np.array(model.getAttr(GRB.Attr.X, variables)))
    if model.Status in (GRB.OPTIMAL, GRB.TIME_LIMIT):
        bound(model.ObjBound)
    return Outcome(NAME, ENDINGS.get(model.Status, "ended"), best if best > -np.inf else None, int(model.NodeCount))


def _params(limits: Limits) -> dict[str, float | int]:
    return {
        "OutputFlag": 0,
        "Threads": limits.threads,
        "Seed": limits.seed,
        "TimeLimit": limits.seconds,
        "MIPGap": 0.0,
        "MIPGapAbs": 1e-6,
        "FeasibilityTol": TOLERANCE,
        "IntFeasTol": TOLERANCE,
    }


def _fill(model: gp.Model, rows: Rows) -> list[gp.Var]:
    kinds = [GRB.INTEGER if whole else GRB.CONTINUOUS for whole in rows.whole]
    variables = list(model.addVars(range(len(kinds)), lb=rows.lower, ub=rows.upper, vtype=kinds).values())
    for index, value, at_least in rows.each():
        model.addLConstr(gp.LinExpr(value, [variables[var] for var in index]), GRB.GREATER_EQUAL, at_least)
    return variables
