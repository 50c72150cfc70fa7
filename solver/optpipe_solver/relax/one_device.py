"""The least length of a pipeline in which only one device has limits: a lower bound, found by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.problem import Problem
from optpipe_solver.bounds.paths import Pass, shortest_paths
from optpipe_solver.bounds.relaxations import one_level, without_evictions
from optpipe_solver.relax import one_stage_search, one_stage_state, several_stages_search, several_stages_state
from optpipe_solver.relax.one_stage import one_stage_device
from optpipe_solver.relax.several_stages import several_stages_device
from optpipe_solver.relax.states import IS_COMPLETE, IS_FULL, States, no_states

MOST_STATES = 2**20  # of one device
POPS = 1_000  # states taken for each bound that is yielded
MOST_MICROBATCHES = 512


def searchable_devices(problem: Problem) -> list[int]:
    """Return the devices that a search can tell something about.

    These are the devices that micro-batches pass on one stage and one route, and those that they pass on several stages
    of one route where all activations stay. Micro-batches are taken to be equal: where they differ there is none.
    """
    if problem.overlap_factor is not None or problem.microbatches > MOST_MICROBATCHES or not problem.costs.are_equal:
        return []
    problem = one_level(without_evictions(problem))
    each = enumerate(shortest_paths(problem).passes)
    return [d for d, passes in each if len(passes) == 1 or _all_stay(problem, passes)]


def _all_stay(problem: Problem, passes: list[Pass]) -> bool:
    """Whether these are passes on one route, from which no activation can leave or be computed again."""
    stages = [problem.stages[s] for _, s in passes]
    return len({j for j, _ in passes}) == 1 and not any(stage.can_offload or stage.can_recompute for stage in stages)


def device_bounds(
    problem: Problem, d: int, objective: Objective = "makespan", most_states: int = MOST_STATES
) -> Iterator[float]:
    """Yield rising bounds in ms on a schedule's length, from device d alone.

    All other devices have ample memory and compute as many ops at a time as they like: they only take the least time
    from the end of an op here to the start of what needs it here. Of several levels of recomputation one is made that
    is as good as each (`one_level`). The last bound is what this pipeline takes, if `most_states` suffice. If no
    schedule fits, the bounds end without it.

    To read on where micro-batches pass the device once: `one_stage_search.expand`, then its state (`one_stage_state`),
    what can follow (`one_stage_moves`) and its bound (`one_stage_bound`); else the files of `several_stages`.
    """
    problem = one_level(without_evictions(problem))
    paths = shortest_paths(problem)
    passes = paths.passes[d]
    j, stages = passes[0][0], [s for _, s in passes]
    microbatches = paths.passing[j]
    expand: Callable[[States, int], float]
    if len(stages) == 1:
        expand = partial(one_stage_search.expand, one_stage_device(problem, j, stages[0], microbatches, objective))
        must_equal = one_stage_state.must_equal(microbatches)
    else:
        device = several_stages_device(problem, j, stages, microbatches, objective)
        expand = partial(several_stages_search.expand, device)
        must_equal = several_stages_state.must_equal(device)
    begins_ms = float(paths.arrives[d]) if objective == "makespan" else 0.0
    states = no_states(most_states, must_equal)
    while not (states.tally[IS_COMPLETE] or states.tally[IS_FULL]):
        least_ms = float(expand(states, POPS))
        if least_ms == NO_SCHEDULE_MS:  # no schedule fits
            return
        yield begins_ms + least_ms
