"""First schedules, for a process that answers one request after the other and has paid for its imports before."""

from __future__ import annotations

from optpipe.errors import InputError
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, End, Infeasible, Note, Refused, Request
from optpipe.reuse import by_rules
from optpipe_solver import tuning
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit
from optpipe_solver.portfolio.placement_search import PlacementSearch
from optpipe_solver.portfolio.portfolio import Portfolio


def warm_up() -> None:
    """Load and compile what answers need, so that nobody waits for it."""
    compile_at_once()
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms")
    stage = {**dict.fromkeys(times, 1.0), "activation_bytes": 2, "saved_for_weight_bytes": 1, "offload_bytes": 2}
    stages, devices = [{"device": d, **stage} for d in range(2)], [{"activation_budget_bytes": 4}] * 2
    small = Problem.from_dict({"microbatches": 4, "devices": devices, "stages": stages})
    answer(Request(problem=small), lambda _: None)
    by_rules(small, None, "makespan")  # an answer that is optimal leaves them out


def answer(request: Request, emit: Emit) -> None:
    """Emit the beginning of the real search: the bounds, the warm start and the first schedules of the heuristics.

    It ends with `End`, or with `Refused` if the method is unknown or does not apply. The first schedules of list
    scheduling are enough, with what a compiled list scheduler finds by simple rules in a moment. Where the former would
    take too long, `naive` comes at once, and published systems are tried for the request's time limit.
    """
    ops = 3 * len(request.problem.stages) * request.problem.microbatches
    large = ops / tuning.OPS_PER_S > tuning.FIRST_LIST_S
    enough = Clock(min(request.time_limit_s, tuning.FIRST_LIST_S) if large else 0.0)
    try:
        search = _search(request.model_copy(update={"time_limit_s": 2 * tuning.FIRST_LIST_S}), emit)
    except InputError as error:
        emit(Refused(reason=str(error)))
        return
    try:
        if search.begin():
            streams = search.heuristics.streams()
            if large and "naive" in streams:
                streams = {"naive": streams["naive"]}
            for _ in search.heuristics.run(streams, share=1.0):
                if search.incumbents.proven or (search.incumbents.best and enough.over):
                    break
            if request.method == "auto" and not search.incumbents.proven:
                search.heuristics.by_rules()
    except Exception as error:  # one request's fault does not end the process
        emit(Note(text=f"no first schedule: {type(error).__name__}: {error}"))
    emit(End())


def _search(request: Request, emit: Emit) -> Portfolio:
    """The beginning of the search.

    Where any stages are allowed, a system that is named runs on its own; everything else begins on the stages as given,
    whose bounds and infeasibility do not hold for all.
    """
    if request.placements == "keep":
        return Portfolio(request, emit)
    any_stages = PlacementSearch(request, emit)
    if any_stages.named:
        return any_stages.first
    start = request.warm_start
    if start is not None and start.placement is not None:
        request = request.model_copy(update={"warm_start": None})
    return Portfolio(request, lambda frame: None if isinstance(frame, Bound | Infeasible) else emit(frame))
