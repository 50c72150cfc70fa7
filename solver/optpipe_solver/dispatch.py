"""The engine `dispatch`: local search over the rules by which a list scheduler chooses what runs next.

It finds schedules with and without transfers, evictions and recomputes.
"""

from __future__ import annotations

from math import inf

from optpipe.dispatch.descents import compile_descents, descents, rules_of_schedule
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.jit import compile_at_once
from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe.model.problem import Problem
from optpipe.process.protocol import Ready, Request
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.schedule_facts import is_modelled

METHOD = "dispatch"
MOST_THREADS: int | None = 1
OPEN_ENDED = True
ALONE = False
OPS_PER_S = 3e6  # simulated, about what a busy machine does
HOPELESS_TRIES = 500  # after which the search ends unless rules lead near the warm start:
HOPELESS_LENGTH = 1.1  # times as long


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    if problem.microbatches == 1:
        return "with one micro-batch there is nothing to choose"
    return None if problem.costs.ms.any() else "nothing takes any time"


def run(request: Request, emit: Emit) -> float | None:
    """Emits better and better schedules until time is up; returns the seconds used by its own count of simulated ops.

    These are what is limited, also with several threads.
    """
    compile_at_once()
    simulator = Simulator(request.problem)
    compile_descents(simulator)
    emit(Ready())
    incumbents = Incumbents.of_engine(request, emit, known=is_modelled)
    clock = Clock(request.time_limit_s, counts=True, wall_s=inf)
    simulated = 0
    shortest_ms = NO_SCHEDULE_MS  # by rules
    offered_ms = NO_SCHEDULE_MS  # the shortest so far, also where that is no better as a schedule
    hopeless_ms = HOPELESS_LENGTH * incumbents.best_ms
    starts = rules_of_schedule(simulator, incumbents.best)
    for rules, ms, tried, listed in descents(simulator, request.objective, request.seed, starts):
        shortest_ms = min(shortest_ms, ms)
        simulated += tried
        if simulated - tried < HOPELESS_TRIES <= simulated and shortest_ms > hopeless_ms:
            break
        clock.count(tried * simulator.ops, OPS_PER_S)
        if shorter(ms, min(incumbents.best_ms, offered_ms)) and (schedule := simulator.schedule(rules, METHOD, listed)):
            offered_ms = ms
            incumbents.offer(schedule)
        if clock.over:
            break
    return clock.spent_s
