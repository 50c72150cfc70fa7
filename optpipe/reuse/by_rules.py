"""A schedule by the rules of a list scheduler: those that another schedule seems to follow, then others.

Rules say nothing of single micro-batches and little of memory, so they hold for other problems where an order does not.
"""

from __future__ import annotations

from optpipe.dispatch.descents import descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import NEVER, Objective
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, of_kinds
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule

METHOD = "dispatch"
MOST_SIMULATED = 400_000  # ops: about 60 ms of compiled search, however many devices there are
EACH = 20  # what it costs to change rules, in ops
PER_DEVICE = 1 / 16  # by so much an op costs more for each device, all of which are looked at when one is over
SAID = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.D, Kind.R)  # by rules


def by_rules(
    problem: Problem, schedule: Schedule | None, objective: Objective, most: int = MOST_SIMULATED
) -> Schedule | None:
    """Searches, until so many ops are simulated, from the rules that a schedule of another problem seems to follow.

    Parameters
    ----------
    schedule
        Of any problem whose stages lie alike on its devices, of which there may be more or fewer; None to begin with
        rules that share memory among stages.
    most
        Ops, of which one counts for more the more devices there are.

    Returns
    -------
    The shortest schedule found; None where rules lead to none, or do not say all: they know one route, no pairs, no
    evictions and no updates on the host. Whether it is valid, its reader checks.
    """
    problems, programs = ((problem,), ()) if schedule is None else ((problem, schedule.problem), schedule.programs)
    said = all(of_kinds(each.table, *SAID).all() and not each.table[:, JOINED].any() for each in programs)
    if not said or any(len(each.all_routes) > 1 for each in problems) or not problem.costs.ms.any():
        return None
    simulator, simulated = Simulator(problem), 0
    best: Rules | None = None
    shortest = NEVER
    for rules, ms, tried in descents(simulator, objective, 0, schedule):
        if ms < shortest:
            best, shortest = rules, ms
        simulated += tried * round((simulator.ops + EACH) * (1 + PER_DEVICE * len(problem.devices)))
        if simulated > most:
            break
    return simulator.schedule(best, METHOD if schedule is None else schedule.method) if best else None
