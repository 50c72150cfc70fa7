"""The engine's search: descents in rules until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable

from optpipe.dispatch.descents import compile_descents, descents
from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import rules_of_schedule
from optpipe.evaluate.objective import NEVER, shorter
from optpipe.process.protocol import Frame, Ready, Request
from optpipe_solver.incumbent import BestSchedule

METHOD = "dispatch"
OPS_PER_S = 3e6  # simulated, about what a busy machine does
HOPELESS_TRIES = 500  # after which the search ends unless rules lead near the schedule given:
HOPELESS_LENGTH = 1.1  # times as long


def search(request: Request, emit: Callable[[Frame], None]) -> float:
    """Run the engine. Returns the seconds used by its own count of simulated ops.

    With one thread these are what is limited, so that the search is the same on a busy machine.
    """
    simulator = Simulator(request.problem)
    compile_descents(simulator)
    emit(Ready())
    best = BestSchedule(request, emit)
    began, spent_s, simulated = time.monotonic(), 0.0, 0
    shortest_ms = NEVER  # by rules
    offered_ms = NEVER  # the shortest so far, also where that is no better as a schedule
    hopeless_ms = HOPELESS_LENGTH * best.value
    given = rules_of_schedule(simulator, best.schedule)
    for rules, ms, tried, listed in descents(simulator, request.objective, request.seed, given):
        shortest_ms = min(shortest_ms, ms)
        simulated += tried
        if simulated - tried < HOPELESS_TRIES <= simulated and shortest_ms > hopeless_ms:
            break
        spent_s += tried * simulator.ops / OPS_PER_S
        if shorter(ms, min(best.value, offered_ms)) and (schedule := simulator.schedule(rules, METHOD, listed)):
            offered_ms = ms
            best.offer(schedule)
        if (spent_s if request.threads == 1 else time.monotonic() - began) > request.time_limit_s:
            break
    return spent_s
