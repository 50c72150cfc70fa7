"""`python -m optpipe_solver.first`: what is known of a problem at once, for one request after the other
(`optpipe.process.child.requests`).

An answer is the beginning of the real search (`optpipe_solver.portfolio`): the bounds, the warm start and the first of
the heuristics, in a process that has paid for its imports. It ends with `End`, or with `Refused` for a method that is
none or none for the problem.
"""

from __future__ import annotations

import resource
import time

from pydantic import ValidationError

from optpipe.errors import InputError, input_error
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.process.child import End, Note, Refused, Request, requests, write_frame
from optpipe.process.heap import settle
from optpipe_solver.portfolio.portfolio import OPS_PER_S, Emit, Portfolio

WORTHWHILE_S = 0.5  # for one schedule by list scheduling
MOST_BYTES = 2**32  # of this process; what needs more is no first schedule


def main() -> None:
    asked = requests()
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    compile_at_once()
    answer(Request(problem=_small()), lambda _: None)  # so that nobody waits for imports and compiled code
    settle()
    for request in asked:
        if isinstance(request, ValidationError):
            write_frame(Refused(reason=str(input_error(request, "the request"))))
        else:
            answer(request, write_frame)


def answer(request: Request, emit: Emit) -> None:
    """Tells the frames of one answer. What list scheduling finds first is enough; where it would take too long there is
    naive at once, and what is published is tried for the request's time limit."""
    large = 3 * len(request.problem.stages) * request.problem.microbatches / OPS_PER_S > WORTHWHILE_S
    enough = time.monotonic() + (min(request.time_limit_s, WORTHWHILE_S) if large else 0.0)
    try:
        search = Portfolio(request.model_copy(update={"time_limit_s": 2 * WORTHWHILE_S}), emit)
    except InputError as error:
        emit(Refused(reason=str(error)))
        return
    try:
        if search.begun():
            streams = search.streams()
            if large and "naive" in streams:
                streams = {"naive": streams["naive"]}
            for _ in search.heuristics(streams, share=1.0):
                if search.optimal or (search.best and time.monotonic() > enough):
                    break
    except Exception as error:  # this request's fault, not the next one's
        emit(Note(text=f"no first schedule: {type(error).__name__}: {error}"))
    emit(End())


def _small() -> Problem:
    stage = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "activation_bytes": 2,
        "saved_for_weight_bytes": 1,
    }
    leaves = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 2}
    stages = [{"device": d, **stage, **leaves} for d in range(2)]
    return Problem.from_dict({"microbatches": 4, "devices": [{"activation_budget_bytes": 4}] * 2, "stages": stages})
