"""The engine `relax`: proves bounds, by searching pipelines in which only one device has limits."""

from __future__ import annotations

import time
from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Request
from optpipe_solver.methods import RELAX

STATES_PER_S = 50_000  # about what a busy machine takes off the heap


class RelaxEngine:
    """Finds no schedules, only bounds."""

    name = RELAX

    def unsupported(self, problem: Problem, *, alone: bool) -> str | None:
        """Why the engine cannot work on this problem, None if it can."""
        from optpipe_solver.relax.one_device import devices

        return None if devices(problem) else "each of its devices has several stages, or none"

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float:
        """Emits better and better bounds; ends when each device has been searched as far as states can be kept.

        Returns
        -------
        The seconds used by its own count of states.
        """
        from optpipe_solver.relax.one_device import POPS, bounds, devices

        began, spent_s, best = time.monotonic(), 0.0, 0.0
        for d in devices(request.problem):
            for ms in bounds(request.problem, d, request.objective):
                spent_s += POPS / STATES_PER_S
                if ms > best:
                    best = ms
                    emit(Bound(method=self.name, lower_bound_ms=ms))
                if (spent_s if request.threads == 1 else time.monotonic() - began) > request.time_limit_s:
                    return spent_s
        return spent_s


ENGINE = RelaxEngine()
