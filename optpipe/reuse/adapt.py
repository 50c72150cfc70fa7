"""`adapt`: a solved schedule, moved to a problem that is like the one it was made for."""

from __future__ import annotations

import logging
from itertools import islice

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.reuse.by_rules import by_rules
from optpipe.reuse.microbatches import recut
from optpipe.reuse.repair import repair
from optpipe.schedule import Schedule, check

log = logging.getLogger("optpipe.reuse")

MOST_CUT = 24  # periods of a steady state, and places where it is cut
MOST_REPAIRED = 12_000  # ops of all schedules that are repaired: up to a second


def adapt(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which may have other times, sizes and memory, and another
    number of micro-batches (OptPipe, section 4.2) or of devices.

    Its order is kept with few changes, or the rules that it seems to follow are, and more like them. For another number
    of micro-batches its steady state is cut only where no rules do; on other devices there are only rules. How long
    that takes grows with `most_ops`, and is counted in ops, not in time.

    Returns
    -------
    The shortest valid schedule found; None if there is none.
    """
    found, ops = _listed(problem, schedule, objective), most_ops(problem, schedule)
    if len(schedule.problem.stages) != len(problem.stages):
        return found
    if ops > MOST_REPAIRED:
        if found is None:
            log.warning("a schedule was not repaired: of %d ops, more than %d would take too long", ops, MOST_REPAIRED)
        return found
    if schedule.problem.microbatches == problem.microbatches:
        moved = repair(problem, schedule, objective)
    elif found is None:
        tries = min(MOST_CUT, MOST_REPAIRED // ops)
        cut = (repair(problem, each, objective) for each in islice(recut(problem, schedule), tries))
        moved = next(filter(None, cut), None)
    else:
        moved = None
    return min(filter(None, (found, moved)), key=lambda each: length_ms(each, objective), default=None)


def most_ops(problem: Problem, schedule: Schedule) -> int:
    """About how many ops the schedule has, or will have when it is adapted to the problem: the work of that grows with
    them."""
    ops = sum(map(len, schedule.programs))
    before, after = (len(each.stages) * each.microbatches for each in (schedule.problem, problem))
    return max(ops, ops * after // before)


def _listed(problem: Problem, schedule: Schedule, objective: Objective) -> Schedule | None:
    try:
        found = by_rules(problem, schedule, objective)
        return None if found is None or check(problem, found) else found
    except OptPipeError:  # it is of other stages
        return None
