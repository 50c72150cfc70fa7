"""The engine `relax`: proves bounds, by searching pipelines in which only one device has limits. It finds no
schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.problem import Problem
from optpipe.process.protocol import Ready, Request
from optpipe_solver.bounds.problem_facts import one_level, shortest_paths, without_evictions
from optpipe_solver.clock import Clock
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.methods import RELAX
from optpipe_solver.relax import one_stage, one_stage_search, several_stages
from optpipe_solver.relax.states import IS_COMPLETE, IS_FULL, States, first_states

MOST_THREADS: int | None = 1
OPEN_ENDED = True
ALONE = False
STATES_PER_S = 50_000  # about what a busy machine takes off the heap
MOST_STATES = 2**20  # of one device
MEETING_STATES = 2**17  # of these, in the search in which micro-batches meet
POPS = 1_000  # states taken for each bound that is yielded
MOST_MICROBATCHES = 512


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    if searchable_devices(problem):
        return None
    if problem.overlap_factor is not None:
        return "it has no pairs"
    if problem.microbatches > MOST_MICROBATCHES:
        return f"of more than {MOST_MICROBATCHES} micro-batches its states do not suffice"
    if not problem.costs.are_equal:
        return "it counts micro-batches, which differ here"
    return "it needs a device with one stage on one route, or with several whose activations can only stay"


def run(request: Request, emit: Emit) -> float | None:
    """Emits better and better bounds; ends when each device has been searched as far as states can be kept.

    The device whose bound is highest at first is searched first. Only one's states are kept at a time: they may take
    300 MB. Returns the seconds used by its own count of states.
    """
    problem, objective = request.problem, request.objective
    devices = searchable_devices(problem)
    first_ms = {d: next(device_bounds(problem, d, objective), 0.0) for d in devices}
    emit(Ready())  # all is compiled
    incumbents, clock = Incumbents(request, emit), Clock(request.time_limit_s, counts=True, wall_s=inf)
    clock.count(len(devices) * POPS, STATES_PER_S)
    incumbents.raise_bound(max(first_ms.values()), RELAX)
    for d in sorted(devices, key=lambda d: -first_ms[d]):
        for bound_ms in device_bounds(problem, d, objective):
            clock.count(POPS, STATES_PER_S)
            incumbents.raise_bound(bound_ms, RELAX)
            if clock.over:
                return clock.spent_s
    return clock.spent_s


def searchable_devices(problem: Problem) -> list[int]:
    """Return the devices that a search can prove something about: where all micro-batches are equal, those that they
    pass on one stage and one route, and those that they pass on several stages of one route where all activations stay.
    """
    if problem.overlap_factor is not None or problem.microbatches > MOST_MICROBATCHES or not problem.costs.are_equal:
        return []
    problem = one_level(without_evictions(problem))
    searchable = []
    for d, passes in enumerate(shortest_paths(problem).passes):
        stages = [problem.stages[s] for _, s in passes]
        all_stay = not any(stage.can_offload or stage.can_recompute for stage in stages)
        if len(passes) == 1 or (len({j for j, _ in passes}) == 1 and all_stay):
            searchable.append(d)
    return searchable


def device_bounds(
    problem: Problem, d: int, objective: Objective = "makespan", most_states: int = MOST_STATES
) -> Iterator[float]:
    """Yield rising bounds in ms on a schedule's length, from device d alone.

    All other devices have ample memory and compute as many ops at a time as they like: they only take the least time
    from the end of an op here to the start of what needs it here. Several levels of recomputation become one that is
    as good as each (`one_level`). So each schedule of the problem is one of this pipeline, with the same times.

    The search is best-first. A state is what the device has done by some moment, with a bound on the end of every
    schedule that begins like this. All schedules begin with a state that is still to be looked at, so the least of
    their bounds holds for all, at any time. A state is left out only for one with the same ops done, where everything
    is ready as early and no more bytes are held: what follows the one can follow the other. The last bound is what this
    pipeline takes, if `most_states` suffice. If no schedule fits, the bounds end without it.

    A device with one stage whose search has ended is searched again, with micro-batches that meet as trains on a single
    track do. At each stage from this one, a, on, the i-th forward and the j-th input gradient, j < i, come one after
    the other. Let the forward be first at a; so there is a last stage d up to which it always is. With L_s ms from a
    forward's start at s to its input gradient's end there, at least:

    1. At d the i-th forward ends before the j-th input gradient begins. So from the start of that forward to the end of
       that input gradient, both at a, it takes the ways from a to d and back and both ops: L_a - L_d + F_d + B_d.
    2. At the next stage e, if there is one, the j-th input gradient ends before the i-th forward begins. So from the
       j-th forward's start to the i-th input gradient's end, both at a, it takes L_a + L_e.

    When the j-th input gradient starts, 1 admits the stages up to some d; of these, 2 asks least of the last one. So it
    may be worth starting it later, but only when 1 admits the next one.
    """
    problem = one_level(without_evictions(problem))
    paths = shortest_paths(problem)
    begins_ms = bound_ms = float(paths.arrives[d]) if objective == "makespan" else 0.0
    for expand, states in _searches(problem, d, objective, most_states):
        while not (states.tally[IS_COMPLETE] or states.tally[IS_FULL]):
            least_ms = expand(states, POPS)
            if least_ms == NO_SCHEDULE_MS:  # no schedule fits
                return
            bound_ms = max(bound_ms, begins_ms + float(least_ms))
            yield bound_ms
        if states.tally[IS_FULL]:
            return


def _searches(
    problem: Problem, d: int, objective: Objective, most_states: int
) -> Iterator[tuple[Callable[[States, int], float], States]]:
    """The searches of a device, one after the other, each with its first state."""
    paths = shortest_paths(problem)
    passes = paths.passes[d]
    j, stages = passes[0][0], [s for _, s in passes]
    if len(stages) > 1:
        several = several_stages.several_stages_device(problem, j, stages, paths.passing[j], objective)
        expand = partial(several_stages.expand, several, tuple(several_stages.empty_state(several) for _ in range(2)))
        columns = several_stages.WAITING + len(several.weights.ms)
        yield expand, first_states(most_states, several_stages.must_equal(several), columns)
        return
    alone = one_stage.one_stage_device(problem, j, stages[0], paths.passing[j], objective)
    meeting = alone._replace(meetings=one_stage.meetings(problem, j, stages[0]))
    for one, most in ((alone, most_states), (meeting, min(most_states, MEETING_STATES))):
        expand = partial(one_stage_search.expand, one, tuple(one_stage.empty_state(one) for _ in range(4)))
        yield expand, first_states(most, one_stage.must_equal(one), one_stage.FIRST_ACTIVATION)
        if len(meeting.meetings) == 1:  # nobody meets after the last stage
            return
