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

    def unsupported(self, problem: Problem) -> str | None:
        """Why the engine cannot work on this problem, None if it can."""
        from optpipe_solver.relax.one_device import MOST_MICROBATCHES, searchable_devices

        if searchable_devices(problem):
            return None
        if problem.overlap_factor is not None:
            return "it knows no pairs"
        if problem.microbatches > MOST_MICROBATCHES:
            return f"of more than {MOST_MICROBATCHES} micro-batches its states do not suffice"
        if not problem.costs.are_equal:
            return "it counts micro-batches, which differ here"
        return "it needs a device with one stage on one route, or with several whose activations can only stay"

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float:
        """Emits better and better bounds; ends when each device has been searched as far as states can be kept.

        The device whose bound is highest at first is searched first. Only one's states are kept at a time: they
        may take 300 MB.

        Returns
        -------
        The seconds used by its own count of states.
        """
        from optpipe_solver.relax.one_device import POPS, device_bounds, searchable_devices

        problem, objective = request.problem, request.objective
        first_ms = {d: next(device_bounds(problem, d, objective), 0.0) for d in searchable_devices(problem)}
        emit(Ready())  # all is compiled
        spent_s, best_ms = len(first_ms) * POPS / STATES_PER_S, max(first_ms.values())
        emit(Bound(method=self.name, lower_bound_ms=best_ms))
        for d in sorted(first_ms, key=lambda d: -first_ms[d]):
            for bound_ms in device_bounds(problem, d, objective):
                spent_s += POPS / STATES_PER_S
                if bound_ms > best_ms:
                    best_ms = bound_ms
                    emit(Bound(method=self.name, lower_bound_ms=best_ms))
                if spent_s > request.time_limit_s:
                    return spent_s
        return spent_s


ENGINE = RelaxEngine()
