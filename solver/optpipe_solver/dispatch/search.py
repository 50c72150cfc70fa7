"""The engine's search: descents in rules until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable

from optpipe.dispatch.descents import compile_descents, descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import NEVER, shorter
from optpipe.process.protocol import Frame, Ready, Request
from optpipe_solver.incumbent import BestSchedule

METHOD = "dispatch"
OPS_PER_S = 3e6  # simulated, about what a busy machine does
HOPELESS = (500, 1.1)  # after so many tries it is over if all are so many times longer than the schedule given


def search(request: Request, emit: Callable[[Frame], None]) -> float:
    """Runs the engine; returns the seconds used by its own count of simulated ops.

    With one thread these are what is limited, so that the search is the same on a busy machine.
    """
    simulator, shortest, (tries, factor) = Simulator(request.problem), NEVER, HOPELESS
    compile_descents(simulator)
    emit(Ready())
    began, spent_s, simulated = time.monotonic(), 0.0, 0
    offered_ms = NEVER  # the shortest so far, also where that is no better as a schedule
    best = BestSchedule(request, emit)
    hopeless_ms = factor * best.value
    for rules, ms, tried in descents(simulator, request.objective, request.seed, best.schedule):
        shortest, simulated = min(shortest, ms), simulated + tried
        if simulated - tried < tries <= simulated and shortest > hopeless_ms:
            break
        spent_s += tried * simulator.ops / OPS_PER_S
        if shorter(ms, min(best.value, offered_ms)) and (schedule := simulator.schedule(rules, METHOD)):
            offered_ms = ms
            best.offer(schedule)
        if (spent_s if request.threads == 1 else time.monotonic() - began) > request.time_limit_s:
            break
    return spent_s
