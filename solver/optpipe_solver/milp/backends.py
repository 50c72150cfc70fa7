"""The backends HiGHS, Gurobi and PuLP, each a function from a `Task` to an `Outcome`, and their choice.

A backend's library is loaded when it is used; Gurobi's and PuLP may be missing.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from optpipe.errors import SolverError
from optpipe.model.arrays import Floats
from optpipe_solver.clock import Clock
from optpipe_solver.methods import usual_name
from optpipe_solver.milp.rows import Rows

if TYPE_CHECKING:
    import gurobipy
    import highspy
    import pulp

# Of feasibility and of integrality. With times up to a thousand, what leaks through a big-M stays far below `MARGIN`.
TOLERANCE = 1e-8
MARGIN = 1e-6  # bounds are lowered by that, so that the tolerance makes none wrong
INFINITE = 1e100  # no solver's bound
# HiGHS calls back after a fixed amount of work: by entry of the matrix, this many times in a second before it branches
# and after that, half of what a quiet machine does. Work is the same again where time is not.
ROOT_PER_S, TREE_PER_S = 200_000, 5_000_000
MOST_NODES = 500  # of HiGHS for completing a start, which has to be quick
PIP_SIZE = 2000  # variables and rows that the licence of gurobipy is for
CBC = ("PULP_CBC_CMD", "COIN_CMD")
PULP_SHARE = 0.9  # of the time is the solver's of PuLP: its solution comes at its end, and must come in time
NEARLY = 0.9  # of its time is used by a solver that stops at its limit: CBC does so a little before
# An optimum of PuLP's is lowered by that to be a bound: a solver that ignores the gap asked for stops at 1e-4.
PULP_MARGIN = 2e-4
PULP_TOLERANCE = 1e-5  # of what PuLP calls a solution: its solvers' default of integrality


class UnavailableError(SolverError):
    """A backend is not installed, has no licence for a model of this size, or fails; its text is why."""


@dataclass(frozen=True)
class Task:
    """Minimize one variable subject to rows."""

    rows: Rows
    objective: int  # the number of the variable (Eq. 2)
    start: dict[int, float]  # values of binaries to start from, empty to start from nothing
    clock: Clock  # gets the work where it counts it
    threads: int
    seed: int
    on_solution: Callable[[Floats], None]  # gets each better x as soon as the backend has it
    on_bound: Callable[[float], None]  # gets each better lower bound, at most `MARGIN` too low
    on_start: Callable[[str], None] = lambda solver: None  # gets the name of the solver before it begins
    gap: float = 1e-6  # what is better by less is not searched for; not by way of PuLP, whose bounds are its optima


Status = Literal["optimal", "infeasible", "time is up", "ended", "not ended"]


@dataclass(frozen=True)
class Outcome:
    """How a search ended."""

    solver: str
    status: Status
    bound: float | None = None  # the best, in the model's time
    nodes: int | None = None  # that were looked at; None where the solver does not count them
    seconds: float = 0.0  # that it took


Minimize = Callable[[Task], Outcome]  # returns when the optimum is proven or time is up; raises UnavailableError


def minimize(solver: str, task: Task, note: Callable[[str], None]) -> tuple[str, Outcome]:
    """Solves with the backend of that name or, if it is not available, notes why and solves with HiGHS. Returns which
    did it, and how it ended."""
    began = time.monotonic()
    try:
        outcome = find_backend(solver)(task)
    except UnavailableError as reason:
        note(f"{reason}; HiGHS solves it instead")
        solver, outcome = "highs", find_backend("highs")(task)
    return solver, replace(outcome, seconds=time.monotonic() - began)


def find_backend(solver: str) -> Minimize:
    """The backend of that name, in any case: `auto`, `highs`, `gurobi`, `pulp`, `pulp:NAME`, or the NAME alone.

    `auto` is Gurobi if the user has a licence: the one that comes with gurobipy is for small models, and not for
    production. Otherwise it is HiGHS.
    """
    kind, _, within = solver.partition(":")
    kind = kind.lower()
    if kind == "auto":
        return find_backend("gurobi" if _gurobi_is_licensed() else "highs")
    if kind == "highs":
        return _minimize_by_highs
    try:
        if kind == "gurobi":
            import gurobipy  # noqa: F401

            return _minimize_by_gurobi
        return _find_solver_of_pulp(within if kind == "pulp" else solver)
    except ImportError as error:
        extra = "gurobi" if kind == "gurobi" else "pulp"
        raise UnavailableError(
            f"solver = {solver!r}: {error.name} is not installed (pip install 'optpipe[{extra}]')"
        ) from None


def is_licensed(solver: str) -> bool:
    """Whether a backend is Gurobi, also PuLP's, with a licence of the user's own."""
    kind, _, within = solver.partition(":")
    name = usual_name(within if kind.lower() == "pulp" else kind)
    return name in ("auto", "gurobi") and _gurobi_is_licensed()


def most_rows(solver: str) -> float:
    """How many rows, and variables, a backend takes: Gurobi, also PuLP's, no more than its licence is for."""
    kind, _, within = solver.partition(":")
    is_gurobi = usual_name(within if kind.lower() == "pulp" else kind) == "gurobi"
    return PIP_SIZE if is_gurobi and not _gurobi_is_licensed() else math.inf


class _BestBound:
    """The best bound of a search, in the model's time; each better one goes to the task."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.value: float | None = None

    def offer(self, value: float) -> None:
        if (self.value is None or self.value < value) and abs(value) < INFINITE:
            self.value = value
            self._task.on_bound(value * (1 - MARGIN))


# HiGHS: better solutions and bounds by callback.


def _minimize_by_highs(task: Task) -> Outcome:
    """Python code in other threads runs on."""
    from highspy import HighsModelStatus

    task.on_start("HiGHS")
    start, highs, best = _completed(task), _highs(task), _BestBound(task)
    if start is not None:
        highs.setSolution(len(start), np.arange(len(start), dtype=np.int32), start)
    highs.cbMipImprovingSolution += lambda event: task.on_solution(np.array(event.data_out.mip_solution))
    highs.cbMipLogging += lambda event: best.offer(event.data_out.mip_dual_bound)
    _run_highs(highs, task)
    info, status = highs.getInfo(), highs.getModelStatus()
    if _has_solution(highs):  # the callback is not called for every solution that is found outside the tree
        task.on_solution(np.array(highs.getSolution().col_value))
    if status not in (HighsModelStatus.kInfeasible, HighsModelStatus.kSolveError):
        best.offer(info.mip_dual_bound)
    endings: dict[HighsModelStatus, Status] = {
        HighsModelStatus.kOptimal: "optimal",
        HighsModelStatus.kInfeasible: "infeasible",
        HighsModelStatus.kTimeLimit: "time is up",
        HighsModelStatus.kInterrupt: "time is up",
    }
    nodes = max(0, int(info.mip_node_count))  # -1: infeasible without any
    return Outcome("HiGHS", endings.get(status, "ended"), best.value, nodes)


def _completed(task: Task) -> Floats | None:
    """The start with all its variables. HiGHS would complete it, too, but would give that smaller program's bound as a
    bound of the whole."""
    if not task.start:
        return None
    highs = _highs(task)
    values = np.array(list(task.start.values()))
    highs.setOptionValue("mip_max_nodes", MOST_NODES)
    highs.changeColsBounds(len(values), np.array(list(task.start), dtype=np.int32), values, values)
    _run_highs(highs, task)
    return np.array(highs.getSolution().col_value) if _has_solution(highs) else None


def _run_highs(highs: highspy.Highs, task: Task) -> None:
    """Its limit counts from the start of this run; its threads are the process's, and the first run fixes how many."""
    entries = len(task.rows.matrix()[2])

    def count(event: highspy.highs.HighsCallbackEvent) -> None:
        task.clock.count(entries, TREE_PER_S if event.data_out.mip_node_count > 0 else ROOT_PER_S)
        event.data_in.user_interrupt = task.clock.over

    if task.clock.counts:
        task.clock.count(entries, ROOT_PER_S)
        highs.cbMipInterrupt += count
    highs.resetGlobalScheduler(True)
    highs.setOptionValue("time_limit", task.clock.wall_left_s)
    highs.run()


def _has_solution(highs: highspy.Highs) -> bool:
    from highspy import SolutionStatus

    return bool(highs.getInfo().primal_solution_status == SolutionStatus.kSolutionStatusFeasible)


def _highs(task: Task) -> highspy.Highs:
    import highspy

    highs = highspy.Highs()
    options = {
        "output_flag": True,  # without it the log's callback, which brings the bounds, stays silent
        "log_to_console": False,
        "threads": task.threads,
        "random_seed": task.seed,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": task.gap,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "mip_min_logging_interval": 0.5,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    rows, lp = task.rows, highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(rows.lower), len(rows.at_least)
    cost = np.zeros(lp.num_col_)
    cost[task.objective] = 1.0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.array(rows.lower), np.array(rows.upper)
    lp.row_lower_, lp.row_upper_ = np.array(rows.at_least), np.full(lp.num_row_, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = rows.matrix()
    types = highspy.HighsVarType
    lp.integrality_ = [types.kInteger if binary else types.kContinuous for binary in rows.binary]
    highs.passModel(lp)
    return highs


# Gurobi: incumbents and bounds by callback, and a MIP start.


@cache
def _gurobi_is_licensed() -> bool:
    """Whether there is a licence for larger models than that of gurobipy."""
    try:
        import gurobipy as gp
    except ImportError:
        return False
    try:
        with gp.Env(params={"OutputFlag": 0}) as env, gp.Model(env=env) as model:
            model.addVars(PIP_SIZE + 1)
            model.optimize()
    except gp.GurobiError:
        return False
    return True


def _minimize_by_gurobi(task: Task) -> Outcome:
    import gurobipy as gp

    task.on_start("Gurobi")
    try:
        with gp.Env(params=_gurobi_params(task) | {"MIPGapAbs": task.gap}) as env, gp.Model(env=env) as model:
            return _run_gurobi(model, task)
    except gp.GurobiError as error:
        if error.errno == gp.GRB.Error.SIZE_LIMIT_EXCEEDED:
            size = f"{len(task.rows.lower)} variables and {len(task.rows.at_least)} rows"
            raise UnavailableError(
                f"Gurobi has no licence for this model of {size}, the one of pip being for {PIP_SIZE} of each"
            ) from None
        raise UnavailableError(f"Gurobi failed: {error}") from None


def _gurobi_params(task: Task) -> dict[str, float]:
    return {
        "OutputFlag": 0,
        "Threads": task.threads,
        "Seed": task.seed,
        "MIPGap": 0.0,
        "MIPGapAbs": 1e-6,
        "FeasibilityTol": TOLERANCE,
        "IntFeasTol": TOLERANCE,
    }


def _run_gurobi(model: gurobipy.Model, task: Task) -> Outcome:
    import gurobipy as gp
    from gurobipy import GRB

    rows, best = task.rows, _BestBound(task)
    types = [GRB.BINARY if binary else GRB.CONTINUOUS for binary in rows.binary]
    variables = list(model.addVars(range(len(types)), lb=rows.lower, ub=rows.upper, vtype=types).values())
    for index, values, at_least in rows.each():
        model.addLConstr(gp.LinExpr(values, [variables[var] for var in index]), GRB.GREATER_EQUAL, at_least)
    model.setObjective(variables[task.objective], GRB.MINIMIZE)
    for var, value in task.start.items():
        variables[var].Start = value

    def callback(model: gp.Model, where: int) -> None:
        if where == GRB.Callback.MIPSOL:
            task.on_solution(np.array(model.cbGetSolution(variables)))
        elif where == GRB.Callback.MIP:
            best.offer(model.cbGet(GRB.Callback.MIP_OBJBND))

    model.Params.TimeLimit = task.clock.wall_left_s
    if task.clock.counts:
        model.Params.WorkLimit = task.clock.left_s  # a unit of work is about a second
    model.optimize(callback)
    task.clock.spend(model.Work)
    if model.SolCount:
        task.on_solution(np.array(model.getAttr(GRB.Attr.X, variables)))
    if model.Status in (GRB.OPTIMAL, GRB.TIME_LIMIT, GRB.WORK_LIMIT):
        best.offer(model.ObjBound)
    endings: dict[int, Status] = {
        GRB.OPTIMAL: "optimal",
        GRB.INFEASIBLE: "infeasible",
        GRB.INF_OR_UNBD: "infeasible",
        GRB.TIME_LIMIT: "time is up",
        GRB.WORK_LIMIT: "time is up",
    }
    return Outcome("Gurobi", endings.get(model.Status, "ended"), best.value, int(model.NodeCount))


# PuLP: CBC, which comes with it, and any other solver that it finds. Solutions and bounds come at the end only.


def _find_solver_of_pulp(name: str) -> Minimize:
    """The backend for PuLP's solver of that name, however it is written, for CBC if it is empty."""
    import pulp

    wanted = usual_name(name or "cbc")
    spelled = sorted((each for each in pulp.listSolvers() if usual_name(each) == wanted), key=lambda each: each != name)
    for chosen in CBC if wanted == "cbc" else spelled:
        if pulp.getSolver(chosen, msg=False).available():
            return lambda task: _minimize_by_pulp(chosen, task)
    available = ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
    raise UnavailableError(f"solver = 'pulp:{name or CBC[0]}': PuLP does not find this solver; it finds {available}")


def _minimize_by_pulp(name: str, task: Task) -> Outcome:
    import pulp

    rows, shown = task.rows, f"PuLP's {name}"
    task.on_start(shown)
    problem, variables = pulp.LpProblem("optpipe", pulp.LpMinimize), []
    for k, (low, high, binary) in enumerate(zip(rows.lower, rows.upper, rows.binary, strict=True)):
        variables.append(pulp.LpVariable(f"x{k}", low, high, pulp.LpInteger if binary else pulp.LpContinuous))
    problem += variables[task.objective]
    for index, values, at_least in rows.each():
        problem += pulp.LpAffineExpression(zip((variables[var] for var in index), values, strict=True)) >= at_least
    if task.start:
        x = np.array(rows.lower)
        x[list(task.start)] = list(task.start.values())
        for variable, value in zip(variables, rows.earliest(x).tolist(), strict=True):
            variable.setInitialValue(value, check=False)
    began, seconds = time.monotonic(), PULP_SHARE * task.clock.left_s
    if not seconds:  # some of PuLP's solvers take 0 for no limit
        return Outcome(shown, "time is up")
    try:
        problem.solve(_solver_of_pulp(name, seconds, task))
    except Exception as error:  # PuLP lets through what a solver's own library raises
        raise UnavailableError(f"{shown} failed: {error}") from None
    took_s = time.monotonic() - began
    task.clock.spend(took_s)
    used_its_time = took_s >= NEARLY * seconds
    x = np.array([variable.value() or 0.0 for variable in variables])
    match problem.sol_status:
        case pulp.LpSolutionOptimal:
            optimum = float(x[task.objective])
            task.on_solution(x)
            task.on_bound(optimum * (1 - PULP_MARGIN))
            return Outcome(shown, "optimal", optimum)
        case pulp.LpSolutionInfeasible if not used_its_time:
            return Outcome(shown, "infeasible")
        case _ if problem.valid(PULP_TOLERANCE):  # whatever its status: of Gurobi, when time is up, "No Solution"
            task.on_solution(x)
    return Outcome(shown, "time is up" if used_its_time else "ended")


def _solver_of_pulp(name: str, seconds: float, task: Task) -> pulp.LpSolver:
    """PuLP's solver with those of the task's limits that PuLP can pass on to it."""
    import pulp

    options: dict[str, object] = {
        "msg": False,
        "timeLimit": seconds,
        "threads": task.threads,
        "gapRel": 0.0,
        "warmStart": bool(task.start),
    }
    if name in CBC:
        seed = [f"randomSeed {task.seed}", f"randomCbcSeed {task.seed}"]
        options["options"] = [f"primalTolerance {TOLERANCE}", f"integerTolerance {TOLERANCE}", *seed]
    parameters = inspect.signature(type(pulp.getSolver(name)).__init__).parameters
    options = {option: value for option, value in options.items() if option in parameters}
    return pulp.getSolver(name, **options, **(_gurobi_params(task) if name == "GUROBI" else {}))
