"""`adapt`: a solved schedule, moved to a problem that is like the one it was made for."""

from __future__ import annotations

from itertools import islice

from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.reuse.microbatches import with_microbatches
from optpipe.reuse.repair import repair
from optpipe.schedule import Schedule

MOST_TRIED = 24  # periods of a steady state, and places where it is cut
MOST_FOUND = 4


def adapt(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which may have other times, sizes and memory, and another
    number of micro-batches (OptPipe, section 4.2).

    Returns
    -------
    The shortest valid schedule found; None if a few changes do not suffice.
    """
    if schedule.problem.microbatches == problem.microbatches:
        return repair(problem, schedule)
    tried = islice(with_microbatches(problem, schedule), MOST_TRIED)
    found = list(islice((repaired for each in tried if (repaired := repair(problem, each))), MOST_FOUND))
    return min(found, key=lambda each: length_ms(each, objective), default=None)
