"""The schedules that everything else is measured against: GPipe and 1F1B."""

from __future__ import annotations

from optpipe.ops import Kind, Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.order import in_order, warmed_up
from optpipe_solver.systems.system import System


def gpipe(problem: Problem) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards. Bubble (p-1)/(p-1+m) of the time; every activation is held."""
    return _phases(problem, [problem.microbatches] * len(problem.stages))


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021): stage s of p begins with p - s - 1 forwards, then runs one forward, one backward.
    GPipe's bubble; p - s activations at most."""
    return _phases(problem, [len(problem.stages) - s - 1 for s in range(len(problem.stages))])


def _phases(problem: Problem, warm_up: list[int]) -> Schedule:
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for s, stage in enumerate(problem.stages):
        forwards = [Op(Kind.F, s, j) for j in range(problem.microbatches)]
        lists[stage.device] = warmed_up(forwards, [[Op(Kind.BW, s, j)] for j in range(problem.microbatches)], warm_up[s])
    return in_order(problem, lists)


SYSTEMS = (
    System("gpipe", "Huang et al. 2019; survey, section on GPipe", gpipe),
    System("1f1b", "Narayanan et al. 2021 (PipeDream-Flush); survey", one_f_one_b),
)
