"""What engines need of a schedule beyond its times: what must follow each op, when transfers allocate, and the same
schedule with B and W for each BW."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.evaluate.objective import Objective
from optpipe.evaluate.timeline import Timeline, depths
from optpipe.model.arrays import Flags, Floats
from optpipe.model.ops import COMPUTE, OPTIMIZER, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, STAGE, Program, of_kinds
from optpipe.schedule import Schedule
from optpipe_solver.methods import ENGINES


def has_only_known_ops(schedule: Schedule) -> bool:
    """Whether the engines' models know all of the schedule's kinds of ops: no optimizer on the host."""
    return not any(of_kinds(program.table, *OPTIMIZER).any() for program in schedule.programs)


def is_modelled(schedule: Schedule) -> bool:
    """Whether the engines' models know all its ops, and none of them run in pairs."""
    return has_only_known_ops(schedule) and not any(program.table[:, JOINED].any() for program in schedule.programs)


def is_listed(schedule: Schedule) -> bool:
    """Whether it `is_modelled` and no engine found it: a heuristic, a published system, or the user."""
    return schedule.method not in ENGINES and is_modelled(schedule)


def needs_fused(problem: Problem) -> Flags:
    """(S,) the stages whose BW needs less memory than B and W for some micro-batch: only there it can do what they
    cannot."""
    effects = Effects(problem)
    held = (effects.takes - effects.frees)[Kind.F]

    def most(stage: int, j: int, *kinds: Kind) -> int:
        holdings = effects.holdings(stage, j, Kind.F, *kinds)
        return max([int(held[stage, j]), *(each.bytes for each in holdings if each.kind != Kind.F)])

    return np.array(
        [
            any(most(s, j, Kind.B, Kind.W) > most(s, j, Kind.BW) for j in problem.costs.representatives.tolist())
            for s in range(len(problem.stages))
        ]
    )


def pays_whole(problem: Problem) -> bool:
    """Whether fused backwards may be better than B and W: there is more to pair with, or less memory is needed."""
    return problem.overlap_factor is not None or bool(needs_fused(problem).any())


def deliveries(schedule: Schedule, objective: Objective) -> Floats:
    """(D,) how long each device's work counts after its end, in ms, so that the end of everything is what the objective
    makes long; zeros for the makespan.

    With the span (OptPipe Eq. 3) a device that starts later may end later. As long as no device's start moves, the span
    is the time at which all work is delivered, less a constant: a makespan with delivery times (Jackson 1955).
    """
    timeline = schedule.timeline
    first = np.full(len(schedule.problem.devices), np.inf)
    compute = timeline.rows.of_kinds(*COMPUTE)
    if objective == "span":
        np.minimum.at(first, timeline.device[compute], timeline.start[compute])
    idle = np.isinf(first)
    delivery: Floats = np.where(idle, 0.0, np.max(first[~idle], initial=0.0) - first)
    return delivery


def tails(schedule: Schedule, delivery: Floats | None = None) -> Floats:
    """(n,) the longest path from each op's start to the end in ms, by rows of the timeline.

    `delivery`: what to add after each device's compute ops, as from `deliveries`.
    """
    compiled, rows = schedule.compiled, schedule.compiled.rows
    lasts, (waits, delays) = compiled.durations_ms, compiled.waits
    tail: Floats = lasts + (0.0 if delivery is None else delivery[rows.device] * rows.of_kinds(*COMPUTE))
    depth = depths(waits, np.arange(len(rows)))
    ranked = np.argsort(depth, kind="stable")
    for group in reversed(np.split(ranked, np.flatnonzero(np.diff(depth[ranked])) + 1)):  # later groups wait for it
        for needed, delay in zip(waits[group].T, delays[group].T, strict=True):
            np.maximum.at(tail, needed[needed >= 0], (lasts[needed] + tail[group] + delay)[needed >= 0])
    return tail


def allocation_times(timeline: Timeline) -> Floats:
    """(n,) when each op takes its place in its program, in ms.

    Of a transfer, which allocates then, this is its start or, where it waits for its link, the start of the next op on
    the compute stream.
    """
    n, device = len(timeline.start), timeline.device
    moving = np.flatnonzero(timeline.rows.transfer)
    following = np.minimum.accumulate(np.where(timeline.rows.transfer, n, np.arange(n))[::-1])[::-1][moving]
    moving, following = (rows[following < n] for rows in (moving, following))
    moving, following = (rows[device[following] == device[moving]] for rows in (moving, following))
    moment = timeline.start.copy()
    moment[moving] = np.minimum(moment[moving], moment[following])
    return moment


def split_backwards(schedule: Schedule, keep: Flags | None = None) -> Schedule:
    """The same schedule with B and W, one after the other, for every BW but those of the stages (S,) in `keep`."""
    programs = []
    for program in schedule.programs:
        fused = program.table[:, KIND] == Kind.BW
        if keep is not None:
            fused &= ~keep[program.table[:, STAGE]]
        table = np.repeat(program.table, 1 + fused, axis=0)
        rows = np.flatnonzero(fused) + np.arange(np.count_nonzero(fused))
        table[rows, KIND], table[rows + 1, KIND] = Kind.B, Kind.W
        programs.append(Program(table))
    return replace(schedule, programs=tuple(programs))
