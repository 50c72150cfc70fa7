"""`python -m optpipe_solver.compare`: the schedule of every published system and every heuristic, fitting or not.

For each method that is asked for it writes the bound for its stages and its schedule or, if it does not apply to the
problem, a note that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.errors import InputError, OptPipeError
from optpipe.process.protocol import (
    Bound,
    CompareRequest,
    End,
    Frame,
    Incumbent,
    Note,
    Programs,
    Refused,
    read_request,
    write_frame,
)
from optpipe.schedule import Schedule
from optpipe_solver import heuristics, systems
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.systems import is_system

EVERY = tuple(dict.fromkeys((*HEURISTICS, *systems.SYSTEMS)))


def main() -> None:
    answer(read_request(CompareRequest), write_frame)


def answer(request: CompareRequest, emit: Callable[[Frame], None]) -> None:
    """Emit the frames of one answer."""
    bounds_ms: dict[str, float] = {}  # of the placed problems so far
    try:
        for name in request.methods or ():
            is_system(name)
    except InputError as error:
        emit(Refused(reason=str(error)))
        return
    for name in request.methods or EVERY:
        try:
            schedule = _schedule(name, request)
        except Exception as error:  # one method's fault does not end the comparison
            fault = "" if isinstance(error, OptPipeError) else f"{type(error).__name__}: "
            emit(Note(method=name, text=f"{fault}{error}"))
            continue
        placed = schedule.problem
        if placed.sha256 not in bounds_ms:
            bounds_ms[placed.sha256] = lower_bound(placed, request.objective)
        emit(Bound(method=name, lower_bound_ms=bounds_ms[placed.sha256]))
        emit(Incumbent(method=name, schedule=Programs.from_schedule(schedule)))
    emit(End())


def _schedule(name: str, request: CompareRequest) -> Schedule:
    """A heuristic stays on the problem's own stages and within memory; a system does not ask for either."""
    if name not in HEURISTICS:
        return systems.in_best_order(name, request.problem, request.placements, request.objective)
    if reason := infeasibility(request.problem):
        raise InputError(reason)
    return replace(heuristics.generate(name, request.problem, request.objective), method=name)


if __name__ == "__main__":
    main()
