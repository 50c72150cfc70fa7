"""Heuristics: a schedule in milliseconds, for every problem, then better and better ones.

`adaoffload` searches among the rules of the core's list scheduler, in plain Python, so that nothing waits for a
compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, repeat, zip_longest
from typing import Protocol

from optpipe.dispatch.descents import Step, descents
from optpipe.dispatch.simulate import Simulator
from optpipe.errors import InputError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_solver import systems, tuning
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.heuristics.pairs import in_pairs_or_not, with_fused_backwards
from optpipe_solver.schedule_facts import needs_fused

__all__ = ["STREAMS", "generate"]

UNLIMITED = Clock()


class Heuristic(Protocol):
    """A heuristic: yields one schedule at least, and ends soon after the wall's time of the clock is over."""

    def __call__(self, problem: Problem, objective: Objective, clock: Clock = UNLIMITED) -> Iterator[Schedule]: ...


def generate(method: str, problem: Problem, objective: Objective = "makespan") -> Schedule:
    """Return a heuristic's best schedule with little effort."""
    passes = len(problem.stages) * problem.microbatches
    tries = min(tuning.GENERATE_TRIES, max(2, tuning.GENERATE_OPS // (3 * passes)))
    return min(islice(STREAMS[method](problem, objective), tries), key=lambda schedule: length_ms(schedule, objective))


def naive(problem: Problem, objective: Objective, clock: Clock = UNLIMITED) -> Iterator[Schedule]:
    """One micro-batch at a time, with offload or recompute only where memory demands it."""
    yield one_at_a_time(problem, "naive")


def ada_offload(problem: Problem, objective: Objective, clock: Clock = UNLIMITED) -> Iterator[Schedule]:
    """AdaOffload (OptPipe, Algorithm 1).

    Before its first backward a stage runs the forwards that memory admits. Then an offload follows each forward and a
    reload precedes its backward, as in PipeOffload. What may be in flight, which activations leave or are recomputed,
    and how early a reload starts are searched by simulation. It is never worse than PO-H and PO-F (Wan et al. 2025)
    where these apply to the stages and fit.

    It yields the shortest schedule so far for each that is simulated, from the first that fits on. One micro-batch at a
    time is the answer where no rules lead to any.
    """
    method = "adaoffload"
    best: Schedule | None = None
    lengths, failures, began_s = {NO_SCHEDULE_MS}, 0, clock.passed_s
    for simulator, step in _steps(problem, objective):
        before, is_first = best, best is None
        failures += step.listed is None  # a start is none: the best may be yet to come
        has_pairs = step.ms < NO_SCHEDULE_MS and problem.overlap_factor is not None
        if step.ms not in lengths or has_pairs:  # pairs tell them apart
            lengths.add(step.ms)
            if schedule := simulator.schedule(step.rules, method, step.listed):
                best = _shortest(objective, best, *in_pairs_or_not(problem, schedule))
        if is_first and best is not None:
            yield best
            best = _shortest(objective, best, *_of_systems(problem, method, objective, clock))
        if best is not None:
            yield best
        failures = failures if best is before else 0
        took_s = clock.passed_s - began_s
        if failures == tuning.DESCENT_FAILURES or clock.wall_left_s < took_s:  # another one might take as long
            break
        began_s += took_s
    if best is None:
        yield one_at_a_time(problem, method)


STREAMS: dict[str, Heuristic] = {"naive": naive, "adaoffload": ada_offload}


def _steps(problem: Problem, objective: Objective) -> Iterator[tuple[Simulator, Step]]:
    """Search in rules; where ops may run in pairs, or BW needs less memory, also with fused backwards, in turn."""
    fuses = problem.overlap_factor is not None or needs_fused(problem).any()
    problems = [problem, with_fused_backwards(problem)] if fuses else [problem]
    simulators = [Simulator(each, is_compiled=False) for each in problems]
    searches = [zip(repeat(each), descents(each, objective, seed=0), strict=False) for each in simulators]
    return filter(None, chain.from_iterable(zip_longest(*searches)))  # one may end before the other


def _shortest(objective: Objective, *schedules: Schedule | None) -> Schedule | None:
    return min(filter(None, schedules), key=lambda each: length_ms(each, objective), default=None)


def _of_systems(problem: Problem, method: str, objective: Objective, clock: Clock) -> Iterator[Schedule]:
    """Yield PipeOffload's schedules that apply to the problem's stages and fit."""
    for name in ("po-h", "po-f"):
        if clock.wall_left_s > 0:
            with suppress(InputError):  # it does not apply to these stages
                schedule = replace(systems.in_best_order(name, problem, "keep", objective), method=method)
                if certify(problem, schedule).fits:
                    yield schedule
