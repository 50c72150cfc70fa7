"""`adapt`: a solved schedule, moved to a problem that is like the one it was made for."""

from __future__ import annotations

import logging

from optpipe.dispatch.descents import LOOPS
from optpipe.errors import OptPipeError
from optpipe.evaluate.jit import waits_for_compiler
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.reuse.by_rules import by_rules
from optpipe.reuse.repair import repair
from optpipe.schedule import Schedule, check

log = logging.getLogger("optpipe.reuse")

MOST_REPAIRED = 12_000  # ops of a schedule that is repaired: up to a second


def adapt(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which may have other times, sizes and memory, and another
    number of micro-batches (OptPipe, section 4.2) or of devices.

    The rules that it seems to follow are followed and changed, unless these loops are yet to be compiled on this
    machine; where stages and micro-batches are the same, its order is kept, too. How long that takes grows with
    `most_ops`, and is counted in ops, not in time.

    Returns
    -------
    The shortest valid schedule of these; None if there is none. A schedule with pairs, evictions or optimizers on the
    host follows no rules: there is none for other numbers of micro-batches or devices.
    """
    listed = _by_valid_rules(problem, schedule, objective)
    ordered = _in_order(problem, schedule, reported=listed is None)
    return min(filter(None, (listed, ordered)), key=lambda each: length_ms(each, objective), default=None)


def most_ops(problem: Problem, schedule: Schedule) -> int:
    """About how many ops the schedule has, or will have when it is adapted to the problem: the work of that grows with
    them."""
    ops = sum(map(len, schedule.programs))
    before, after = (len(each.stages) * each.microbatches for each in (schedule.problem, problem))
    return max(ops, ops * after // before)


def _by_valid_rules(problem: Problem, schedule: Schedule, objective: Objective) -> Schedule | None:
    if waits_for_compiler(LOOPS):  # the caller's limit would be over before; a solver's process compiles them
        return None
    try:
        listed = by_rules(problem, schedule, objective)
        return None if listed is None or check(problem, listed) else listed
    except OptPipeError:  # it is of other stages
        return None


def _in_order(problem: Problem, schedule: Schedule, reported: bool) -> Schedule | None:
    """The schedule's order, repaired; if it has too many ops, that is reported or not."""
    if (len(schedule.problem.stages), schedule.problem.microbatches) != (len(problem.stages), problem.microbatches):
        return None
    ops = most_ops(problem, schedule)
    if ops <= MOST_REPAIRED:
        return repair(problem, schedule)
    if reported:
        log.warning("a schedule was not repaired: of %d ops, more than %d would take too long", ops, MOST_REPAIRED)
    return None
