"""HiGHS: better solutions and bounds by callback."""

from __future__ import annotations

import highspy
import numpy as np

from optpipe.model.arrays import Floats
from optpipe_solver.milp.rows import Rows
from optpipe_solver.milp.task import MARGIN, TOLERANCE, Limits, Outcome, Status, Task

NAME = "HiGHS"
MOST_NODES = 500  # for completing a start, which has to be quick


ENDINGS: dict[highspy.HighsModelStatus, Status] = {
    highspy.HighsModelStatus.kOptimal: "optimal",
    highspy.HighsModelStatus.kInfeasible: "infeasible",
    highspy.HighsModelStatus.kTimeLimit: "time is up",
}


def minimize(task: Task) -> Outcome:
    """Minimizes with HiGHS. Python code in other threads runs on."""
    task.on_start(NAME)
    highs = _highs(task.rows, task.objective, task.limits)
    if (start := _completed(task)) is not None:
        highs.setSolution(len(start), np.arange(len(start), dtype=np.int32), start)
    best = -np.inf

    def bound(value: float) -> None:
        nonlocal best
        if best < value < highspy.kHighsInf:
            best = value
            task.on_bound(value * (1 - MARGIN))

    highs.cbMipImprovingSolution += lambda event: task.on_solution(np.array(event.data_out.mip_solution))
    highs.cbMipLogging += lambda event: bound(event.data_out.mip_dual_bound)
    highs.run()
    if highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        # The callback is not called for every solution that is found outside the tree.
        task.on_solution(np.array(highs.getSolution().col_value))
    if highs.getModelStatus() not in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kSolveError):
        bound(highs.getInfo().mip_dual_bound)
    bound_or_none = best if best > -np.inf else None
    nodes = max(0, int(highs.getInfo().mip_node_count))  # -1: infeasible without any
    return Outcome(NAME, ENDINGS.get(highs.getModelStatus(), "ended"), bound_or_none, nodes)


def _completed(task: Task) -> Floats | None:
    """The start with all its variables. HiGHS would complete it, too, but would give that smaller program's bound as a
    bound of the whole."""
    if not task.start:
        return None
    highs = _highs(task.rows, task.objective, task.limits)
    values = np.array(list(task.start.values()))
    highs.setOptionValue("mip_max_nodes", MOST_NODES)
    highs.changeColsBounds(len(values), np.array(list(task.start), dtype=np.int32), values, values)
    highs.run()
    is_feasible = highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return np.array(highs.getSolution().col_value) if is_feasible else None


def _highs(rows: Rows, objective: int, limits: Limits) -> highspy.Highs:
    highs = highspy.Highs()
    options = {
        "output_flag": True,  # without it the log's callback, which brings the bounds, stays silent
        "log_to_console": False,
        "threads": limits.threads,
        "random_seed": limits.seed,
        "time_limit": limits.seconds,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 1e-6,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "mip_min_logging_interval": 0.5,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_program(rows, objective))
    return highs


def _program(rows: Rows, objective: int) -> highspy.HighsLp:
    begins, index, value = rows.matrix()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(rows.lower), len(rows.at_least)
    cost = np.zeros(lp.num_col_)
    cost[objective] = 1.0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.array(rows.lower), np.array(rows.upper)
    lp.row_lower_, lp.row_upper_ = np.array(rows.at_least), np.full(lp.num_row_, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = begins, index, value
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous for whole in rows.whole
    ]
    return lp
