"""`adapt`: a solved schedule, moved to a problem that is like the one it was made for."""

from __future__ import annotations

from itertools import chain, islice

from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.reuse.microbatches import recut, retimed
from optpipe.reuse.repair import repair
from optpipe.schedule import Schedule

MOST_CUT = 24  # periods of a steady state, and places where it is cut
MOST_FOUND = 4  # of those that are valid


def adapt(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which may have other times, sizes and memory, and another
    number of micro-batches (OptPipe, section 4.2).

    Returns
    -------
    The shortest valid schedule found; None if a few changes do not suffice.
    """
    if schedule.problem.microbatches == problem.microbatches:
        return repair(problem, schedule)
    cut = (found for each in islice(recut(problem, schedule), MOST_CUT) if (found := repair(problem, each)))
    timed = (found for each in retimed(problem, schedule) if (found := repair(problem, each)))
    return min(chain(islice(cut, MOST_FOUND), timed), key=lambda each: length_ms(each, objective), default=None)
