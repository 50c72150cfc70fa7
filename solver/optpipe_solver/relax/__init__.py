"""The engine `relax`: proves bounds, by searching pipelines in which only one device has limits."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Ready, Request
from optpipe_solver.methods import RELAX

STATES_PER_S = 50_000  # about what a busy machine takes off the heap


class RelaxEngine:
    """Finds no schedules, only bounds."""

    name = RELAX
    most_threads: int | None = 1
    open_ended = True

    def unsupported(self, problem: Problem, *, alone: bool) -> str | None:
        """Why the engine cannot work on this problem, None if it can."""
        from optpipe_solver.relax.one_device import MOST_MICROBATCHES, devices

        if devices(problem):
            return None
        if problem.overlap_factor is not None:
            return "it knows no pairs"
        if problem.microbatches > MOST_MICROBATCHES:
            return f"of more than {MOST_MICROBATCHES} micro-batches its states do not suffice"
        return "it needs a device with one stage on one route, or with several whose activations can only stay"

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float:
        """Emits better and better bounds; ends when each device has been searched as far as states can be kept.

        The device whose bound is highest at first is searched first. Only one's states are kept at a time: they
        may take 300 MB.

        Returns
        -------
        The seconds used by its own count of states.
        """
        from optpipe_solver.relax.one_device import POPS, bounds, devices

        problem, objective = request.problem, request.objective
        at_first = {d: next(bounds(problem, d, objective), 0.0) for d in devices(problem)}
        emit(Ready())  # all is compiled
        spent_s, best = len(at_first) * POPS / STATES_PER_S, max(at_first.values())
        emit(Bound(method=self.name, lower_bound_ms=best))
        for d in sorted(at_first, key=lambda d: -at_first[d]):
            for ms in bounds(problem, d, objective):
                spent_s += POPS / STATES_PER_S
                if ms > best:
                    best = ms
                    emit(Bound(method=self.name, lower_bound_ms=ms))
                if spent_s > request.time_limit_s:
                    return spent_s
        return spent_s


ENGINE = RelaxEngine()
