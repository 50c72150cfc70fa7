"""Stands in for `optpipe_solver.first`, for the problems of `support.problems.chain`; the request's method says what
it does."""

import os
import signal
import time
from collections.abc import Callable

from optpipe.process.protocol import Bound, End, Frame, Incumbent, Infeasible, Programs, Refused, Request
from support.fakes.solver import together

FINDS_NONE = ("silent", "crash", "invalid", "later", "dies", "fails", "asleep", "endless", "stuck")


def incumbent(*programs: str) -> Incumbent:
    return Incumbent(method="naive", schedule=Programs(programs=programs))


def frames(method: str, m: int) -> list[Frame]:
    """What it finds for m micro-batches, until its end."""
    good, greedy = incumbent(*together(m, 0)), incumbent(*together(m, m))  # the second may need too much memory
    found: dict[str, list[Frame]] = {
        "none": [Refused(reason="method = 'none': the methods are others")],
        "infeasible": [Infeasible(reason="device 0 needs 2000 bytes and has 1000")],
        "infeasible, but": [good, Infeasible(reason="not really")],
        "greedy": [greedy],
        "first good, then greedy": [good, greedy],
        "stranger": [incumbent(*together(m + 1, 0))],
        "babbler": [incumbent("0F0 what?", "1F0")],
        "boaster": [Bound(method="fake", lower_bound_ms=1e6), good],  # a bound that its own schedule disproves
    }
    return found.get(method, [] if method in FINDS_NONE else [good])


def is_system(method: str) -> bool:
    return False


def answer(request: Request, emit: Callable[[Frame], None]) -> None:
    method = request.method
    for frame in frames(method, request.problem.microbatches):
        emit(frame)
    if method in ("dies", "dies late"):
        os._exit(7)
    if method == "fails":
        raise MemoryError
    if method == "stuck":  # as a library that never returns to Python
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    if method in ("asleep", "hangs", "stuck"):
        time.sleep(600)
    while method == "endless":
        emit(Bound(method="fake", lower_bound_ms=1.0))
    emit(End())
