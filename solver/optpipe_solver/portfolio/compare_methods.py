"""`python -m optpipe_solver.compare`: the schedule of every published system and every heuristic, side by side, whether
it fits or not.

Reads one request, whose method names those that are asked for, with a space between them, or is `auto` for all. For
each it writes the bound for its stages and its schedule or, where it is not for the problem, a note that says why.
"""

from __future__ import annotations

from dataclasses import replace

from optpipe.errors import InputError, OptPipeError
from optpipe.process.child import (
    Bound,
    End,
    Frame,
    Incumbent,
    Note,
    Programs,
    Refused,
    Request,
    read_request,
    write_frame,
)
from optpipe.schedule import Schedule
from optpipe_solver import heuristics, systems
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.systems.variants import is_system

EVERY = tuple(dict.fromkeys((*HEURISTICS, *systems.SYSTEMS)))


def main() -> None:
    request = read_request()
    try:
        names = asked(request.method)
    except InputError as error:
        write_frame(Refused(reason=str(error)))
        return
    bounds: dict[str, float] = {}
    for name in names:
        for frame in made(name, request, bounds):
            write_frame(frame)
    write_frame(End())


def asked(methods: str) -> tuple[str, ...]:
    """Raises `InputError` for a name that is neither a system's nor a heuristic's."""
    if methods == "auto":
        return EVERY
    for name in methods.split():
        if name not in HEURISTICS and not is_system(name):
            raise InputError(f"method = {name!r}: those to compare are auto, {', '.join(EVERY)}")
    return tuple(methods.split())


def made(name: str, request: Request, bounds: dict[str, float]) -> list[Frame]:
    """What there is to tell of one method; `bounds` keeps those of the stages seen so far."""
    try:
        schedule = _schedule(name, request)
    except OptPipeError as error:
        return [Note(method=name, text=str(error))]
    except Exception as error:  # one method's fault is not the others' end
        return [Note(method=name, text=f"{type(error).__name__}: {error}")]
    placed = schedule.problem
    if placed.sha256 not in bounds:
        bounds[placed.sha256] = max(trivial_bound(placed, request.objective), memory_bound(placed, request.objective))
    return [
        Bound(method=name, lower_bound_ms=bounds[placed.sha256]),
        Incumbent(method=name, schedule=Programs.of(schedule)),
    ]


def _schedule(name: str, request: Request) -> Schedule:
    """A heuristic stays on the problem's own stages and within memory, a system asks for neither."""
    if name not in HEURISTICS:
        return systems.generate(name, request.problem, request.placements)
    if reason := infeasibility(request.problem):
        raise InputError(reason)
    return replace(heuristics.generate(name, request.problem, request.objective), method=name)
