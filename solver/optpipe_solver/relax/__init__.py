"""The engine `relax`: proves bounds, by searching pipelines in which only one device has limits. It finds no
schedules."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Ready, Request
from optpipe_solver.methods import RELAX
from optpipe_solver.relax import one_device

MOST_THREADS: int | None = 1
OPEN_ENDED = True
STATES_PER_S = 50_000  # about what a busy machine takes off the heap


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    if one_device.searchable_devices(problem):
        return None
    if problem.overlap_factor is not None:
        return "it knows no pairs"
    if problem.microbatches > one_device.MOST_MICROBATCHES:
        return f"of more than {one_device.MOST_MICROBATCHES} micro-batches its states do not suffice"
    if not problem.costs.are_equal:
        return "it counts micro-batches, which differ here"
    return "it needs a device with one stage on one route, or with several whose activations can only stay"


def run(request: Request, emit: Callable[[Frame], None]) -> float:
    """Emits better and better bounds; ends when each device has been searched as far as states can be kept.

    The device whose bound is highest at first is searched first. Only one's states are kept at a time: they may take
    300 MB.

    Returns
    -------
    The seconds used by its own count of states.
    """
    problem, objective = request.problem, request.objective
    devices = one_device.searchable_devices(problem)
    first_ms = {d: next(one_device.device_bounds(problem, d, objective), 0.0) for d in devices}
    emit(Ready())  # all is compiled
    batch_s = one_device.POPS / STATES_PER_S
    spent_s, best_ms = len(devices) * batch_s, max(first_ms.values())
    emit(Bound(method=RELAX, lower_bound_ms=best_ms))
    for d in sorted(devices, key=lambda d: -first_ms[d]):
        for bound_ms in one_device.device_bounds(problem, d, objective):
            spent_s += batch_s
            if bound_ms > best_ms:
                best_ms = bound_ms
                emit(Bound(method=RELAX, lower_bound_ms=best_ms))
            if spent_s > request.time_limit_s:
                return spent_s
    return spent_s
