"""First schedules, for a process that answers one request after the other and has paid for its imports before."""

from __future__ import annotations

from optpipe.dispatch.descents import LOOPS
from optpipe.errors import InputError
from optpipe.evaluate.jit import load_compiled
from optpipe.process.protocol import End, Note, Refused, Request
from optpipe.reuse import by_rules
from optpipe_solver import tuning
from optpipe_solver.engines import small_problem
from optpipe_solver.incumbents import Emit
from optpipe_solver.portfolio import PlacementSearch, Portfolio, offer_remedies
from optpipe_solver.portfolio.heuristic_runs import count_ops


def warm_up() -> None:
    """Load what answers need, so that nobody waits for it; also what is compiled, if it is."""
    small = small_problem()
    answer(Request(problem=small), lambda _: None)
    if load_compiled(LOOPS):
        by_rules(small, None, "makespan")  # an answer that is optimal leaves them out


def answer(request: Request, emit: Emit) -> None:
    """Emit the beginning of the real search: the bounds, the warm start, the published schedules and the first ones of
    list scheduling on the problem's own stages.

    It ends with `End`, or with `Refused` if the method is unknown or does not apply. The first schedules of list
    scheduling are enough, with what a compiled list scheduler, if there is one by now, finds by simple rules in a
    moment. List scheduling that would take too long is left out. A time limit of less than `tuning.THOROUGH_S` leaves
    out rules and other stages.
    """
    is_compiled, is_thorough = load_compiled(LOOPS), request.time_limit_s >= tuning.THOROUGH_S
    most_s = tuning.FIRST_LIST_S if is_thorough else request.time_limit_s
    is_listed = count_ops(request.problem) / tuning.OPS_PER_S <= most_s or not request.starts_from_known
    try:
        search = (PlacementSearch if request.placements == "all" else Portfolio)(request, emit)
    except InputError as error:
        emit(Refused(reason=str(error)))
        return
    try:
        search.begin()
        own = search if isinstance(search, Portfolio) else search.first
        if own is search and is_thorough:
            own.look_at_other_stages()
        if own.begin():
            for _ in own.heuristics.run(1.0) if is_listed else ():
                if own.incumbents.best:
                    break
            if is_compiled and is_thorough and request.method == "auto" and not own.incumbents.proven:
                own.heuristics.by_rules()
        elif own is search:
            offer_remedies(request, emit, search.clock)
    except Exception as error:  # one request's fault does not end the process
        emit(Note(text=f"no first schedule: {type(error).__name__}: {error}"))
    emit(End())
