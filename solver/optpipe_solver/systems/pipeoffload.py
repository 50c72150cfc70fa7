"""PipeOffload (Wan et al. 2025): interleaved schedules that hold less (GIS, GIS-H), uniform ones that offload (PO-H, PO-F).

The paper's letters: d devices, v looped stages on each, g micro-batches a group; T_F, T_B, T_W are f, b, w.
"""

from __future__ import annotations

from math import ceil

from optpipe.errors import InputError
from optpipe.ops import Kind, Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.order import in_order, visits, warmed_up
from optpipe_solver.systems.system import System


def gis(problem: Problem, group: int | None = None) -> Schedule:
    """GIS, the generalised interleaved schedule (section 3): stages take turns every `group` micro-batches, d by default; W right behind B.

    Rank i begins with g(v-1) + d - i forwards, the one before its first B included, then runs one backward, one forward. So rank 0 holds
    g(v-1) + d activations at most, whether they count until B or until W. Bubble: (d-1)(f+b), and for each of the v-1 changes of stage
    (d-g)f + max(0, db - g(b+w)) more: the paper's (d-g)(v-1) is meant in units of f = b = w, its Table 1 has g = d/2. Both hold where
    a group's time g(f+b+w) lets a forward, or a backward, pass all devices, df and db. A last group that is not full is run as if
    it were, without the micro-batches that are not there.
    """
    return _in_groups(problem, "gis", _devices(problem) if group is None else group)


def gis_h(problem: Problem, group: int | None = None) -> Schedule:
    """GIS-H: GIS with groups of ceil(d/2) micro-batches, the fewest between whose turns a forward can pass all devices."""
    return _in_groups(problem, "gis-h", ceil(_devices(problem) / 2) if group is None else group)


def _in_groups(problem: Problem, name: str, g: int) -> Schedule:
    d, m = _devices(problem), problem.microbatches
    v = len(problem.stages) // d
    if not ceil(d / 2) <= g <= d:
        raise InputError(f"group = {g}: {name} on {d} devices takes {ceil(d / 2)} to {d}")
    groups = [range(first, first + g) for first in range(0, m, g)]  # the last one may count micro-batches that are not there
    there, back = visits(groups, range(v)), visits(groups, range(v)[::-1])
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for i in range(d):
        forwards = [Op(Kind.F, c * d + i, j) for c, j in there]
        backwards = [[Op(kind, c * d + i, j) for kind in (Kind.B, Kind.W)] for c, j in back]
        ops = warmed_up(forwards, backwards, g * (v - 1) + d - i - 1)
        lists[problem.stages[i].device] = [op for op in ops if op.microbatch < m]
    return in_order(problem, lists)


def _devices(problem: Problem) -> int:
    """d: of the devices there are those that run any stage."""
    return len({stage.device for stage in problem.stages})


SYSTEMS = (
    System("gis", "PipeOffload, Wan et al. 2025, section 3.1", gis, most=None, chunks=2, parameters=("group",)),
    System("gis-h", "PipeOffload, Wan et al. 2025, section 3.2", gis_h, most=None, chunks=2, parameters=("group",)),
)
