"""`python -m optpipe_solver.compare`: the schedule of every published system and every heuristic, fitting or not.

For each method that is asked for it writes the bound for its stages and its schedule or, if it does not apply to the
problem, a note that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    read_one,
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
    answer(read_one(CompareRequest), write_frame)


def answer(request: CompareRequest, emit: Callable[[Frame], None]) -> None:
    """Emit the frames of one answer."""
    try:
        names = named(request.methods)
    except InputError as error:
        emit(Refused(reason=str(error)))
        return
    bounds_ms: dict[str, float] = {}
    for name in names:
        for frame in frames_of(name, request, bounds_ms):
            emit(frame)
    emit(End())


def named(methods: Sequence[str] | None) -> Sequence[str]:
    """Return the methods to compare. Raises InputError for a name that is no method's."""
    for name in methods or ():
        is_system(name)
    return methods or EVERY


def frames_of(name: str, request: CompareRequest, bounds_ms: dict[str, float]) -> list[Frame]:
    """Return the frames about one method. `bounds_ms` keeps the bounds of the placed problems seen so far."""
    try:
        schedule = _schedule(name, request)
    except OptPipeError as error:
        return [Note(method=name, text=str(error))]
    except Exception as error:  # one method's fault does not end the comparison
        return [Note(method=name, text=f"{type(error).__name__}: {error}")]
    placed = schedule.problem
    if placed.sha256 not in bounds_ms:
        bounds_ms[placed.sha256] = lower_bound(placed, request.objective)
    return [
        Bound(method=name, lower_bound_ms=bounds_ms[placed.sha256]),
        Incumbent(method=name, schedule=Programs.from_schedule(schedule)),
    ]


def _schedule(name: str, request: CompareRequest) -> Schedule:
    """A heuristic stays on the problem's own stages and within memory; a system does not ask for either."""
    if name not in HEURISTICS:
        return systems.in_best_order(name, request.problem, request.placements, request.objective)
    if reason := infeasibility(request.problem):
        raise InputError(reason)
    return replace(heuristics.generate(name, request.problem, request.objective), method=name)


if __name__ == "__main__":
    main()
