"""Heuristics: a schedule in milliseconds, for every problem, then better and better ones.

`adaoffload` searches among the rules of the core's list scheduler, in plain Python, so that nothing waits for a
compiler. `naive` fits where any schedule without evictions does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat, zip_longest

import numpy as np

from optpipe.dispatch.descents import SearchProgress, descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, length_ms
from optpipe.formats.stacks import with_whole_backwards
from optpipe.formats.torch_memory import whole_backwards
from optpipe.lift import TOLERANCE_MS
from optpipe.model.arrays import Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, Program
from optpipe.schedule import Schedule, check
from optpipe_solver import systems, tuning
from optpipe_solver.bounds.least_memory import Relief, host_shares, reliefs
from optpipe_solver.clock import UNLIMITED, Clock
from optpipe_solver.schedule_facts import pays_whole

__all__ = ["STREAMS", "generate", "join_pairs", "one_at_a_time"]


def generate(method: str, problem: Problem, objective: Objective = "makespan") -> Schedule:
    """Return a heuristic's best schedule with little effort."""
    passes = len(problem.stages) * problem.microbatches
    tries = min(tuning.GENERATE_TRIES, max(2, tuning.GENERATE_OPS // (3 * passes)))
    return min(islice(STREAMS[method](problem, objective), tries), key=lambda schedule: length_ms(schedule, objective))


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
        if step.ms not in lengths or has_pairs:  # schedules of one length differ by their pairs
            lengths.add(step.ms)
            if schedule := simulator.schedule(step.rules, method, step.listed):
                best = _shortest(objective, best, *_in_pairs_or_not(problem, schedule))
        if is_first and best is not None:
            yield best
            published = systems.fitting(("po-h", "po-f") if clock.wall_left_s > 0 else (), problem)
            best = _shortest(objective, best, *(replace(each, method=method) for each in published))
        if best is not None:
            yield best
        failures = failures if best is before else 0
        took_s = clock.passed_s - began_s
        if failures == tuning.DESCENT_FAILURES or clock.wall_left_s < took_s:  # another one might take as long
            break
        began_s += took_s
    if best is None:
        yield one_at_a_time(problem, method)


def _steps(problem: Problem, objective: Objective) -> Iterator[tuple[Simulator, SearchProgress]]:
    """Search in rules; where ops may run in pairs, or BW needs less memory, also with fused backwards, in turn."""
    problems = [problem]
    if pays_whole(problem):
        problems.append(with_whole_backwards(problem))
    simulators = [Simulator(each, is_compiled=False) for each in problems]
    searches = [zip(repeat(each), descents(each, objective, seed=0), strict=False) for each in simulators]
    return filter(None, chain.from_iterable(zip_longest(*searches)))  # one may end before the other


def _shortest(objective: Objective, *schedules: Schedule | None) -> Schedule | None:
    return min(filter(None, schedules), key=lambda each: length_ms(each, objective), default=None)


def _in_pairs_or_not(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """Yield a schedule of the problem, or of that with fused backwards, as one of the problem, then with pairs."""
    if schedule.problem is not problem:
        schedule = replace(whole_backwards(schedule).on(problem), rules=None)
        if check(problem, schedule):
            return
    yield schedule
    if joined := join_pairs(schedule):
        yield joined


def join_pairs(schedule: Schedule) -> Schedule | None:
    """Join a forward and a backward of different micro-batches that follow each other at once, if memory holds both.

    Returns None if the problem has no `overlap_factor`, if there is nothing to join, or if the result is not valid.
    """
    problem = schedule.problem
    if problem.overlap_factor is None:
        return None
    compiled, timeline = schedule.compiled, schedule.timeline
    rows, device, table = compiled.rows, compiled.rows.device, compiled.rows.table.copy()
    forward, backward = rows.of_kinds(Kind.F), rows.of_kinds(*problem.paired)
    a, b = slice(None, -1), slice(1, None)
    fit = (device[a] == device[b]) & (rows.microbatch[a] != rows.microbatch[b])
    fit &= (forward[a] & backward[b]) | (backward[a] & forward[b])
    fit &= timeline.start[b] - timeline.end[a] < TOLERANCE_MS
    fit &= (table[a, JOINED] == 0) & (table[b, JOINED] == 0) & (np.r_[0, table[:-2, JOINED]] == 0)
    fit &= compiled.held.during[a] + compiled.effects.takes[b] <= problem.costs.activation_budget[device[a]]
    joined = -2
    for i in np.flatnonzero(fit).tolist():
        if i > joined + 1:
            table[i, JOINED], joined = 1, i
    paired = replace(schedule, programs=tuple(Program(table[device == d]) for d in range(len(problem.devices))))
    # Ops that ran one after the other may wait for each other now.
    return None if joined < 0 or check(problem, paired) else paired


def naive(problem: Problem, objective: Objective, clock: Clock = UNLIMITED) -> Iterator[Schedule]:
    """One micro-batch at a time: needs no clock, so it is there at once."""
    yield one_at_a_time(problem, "naive")


def one_at_a_time(problem: Problem, method: str) -> Schedule:
    """Schedule each micro-batch after the one before it, and offload or recompute no more than memory demands.

    All programs and shared links keep one order of all ops, so nothing deadlocks.
    """
    alone, hosts = problem.costs.representatives.tolist(), host_shares(problem)
    passes = [_one_pass(problem.route(j), reliefs(problem, j, hosts)) for j in alone]
    rows_of = [passes[alike] for alike in problem.costs.class_of.tolist()]
    kind, stage, part = np.concatenate(rows_of).T
    microbatch = np.repeat(np.arange(problem.microbatches), [len(rows) for rows in rows_of])
    table: Table = np.stack([kind, stage, microbatch, part, np.zeros_like(kind)], axis=1).astype(np.int32)
    return Schedule.in_order(problem, table, method=method)


def _one_pass(route: tuple[int, ...], relief: dict[int, Relief]) -> list[tuple[int, int, int]]:
    """Kind, stage and part of one micro-batch's ops: what leaves does so after its forward, and is back before its
    backward."""
    there = [[(Kind.F, s, 0), *((kind, s, p) for kind in (Kind.O, Kind.D) for p in relief[s].parts)] for s in route]
    back = [
        [
            *((Kind.R, s, p) for p in relief[s].parts),
            *([(Kind.C, s, relief[s].level)] if relief[s].is_recomputed else []),
            (Kind.BW, s, 0),
        ]
        for s in reversed(route)
    ]
    return [row for rows in (*there, *back) for row in rows]


# Each yields one schedule at least, and ends soon after the wall's time of the clock is over.
STREAMS: dict[str, Callable[..., Iterator[Schedule]]] = {"naive": naive, "adaoffload": ada_offload}
