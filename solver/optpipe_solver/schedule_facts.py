"""What engines need of a schedule beyond its times: what must follow each op, when transfers allocate, and the same
schedule with B and W for each BW."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.evaluate.objective import Objective
from optpipe.evaluate.timeline import Timeline
from optpipe.model.arrays import Flags, Floats
from optpipe.model.ops import COMPUTE, OPTIMIZER, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, STAGE, Program, of_kinds
from optpipe.schedule import Schedule


def has_only_known_ops(schedule: Schedule) -> bool:
    """Whether the engines' models know all of the schedule's kinds of ops: no optimizer on the host."""
    return not any(of_kinds(program.table, *OPTIMIZER).any() for program in schedule.programs)


def is_modelled(schedule: Schedule) -> bool:
    """Whether the engines' models know all its ops, and none of them run in pairs."""
    return has_only_known_ops(schedule) and not any(program.table[:, JOINED].any() for program in schedule.programs)


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


def tails(schedule: Schedule, delivery: Floats | None = None) -> list[float]:
    """The longest path from each op's start to the end, in ms, by rows of the timeline: `simulate`'s graph backwards.

    `delivery`: what to add after each device's compute ops, as from `deliveries`.
    """
    compiled = schedule.compiled
    lasts = compiled.durations_ms.tolist()
    waits, delays = (array.tolist() for array in compiled.waits)
    followers = [0] * len(lasts)
    for row in waits:
        for j in row:
            followers[j] += j >= 0
    tail: list[float] = list(lasts)
    if delivery is not None:
        rows = compiled.rows
        tail = (compiled.durations_ms + delivery[rows.device] * rows.of_kinds(*COMPUTE)).tolist()
    ready = [i for i, n in enumerate(followers) if n == 0]
    while ready:
        i = ready.pop()
        for j, delay in zip(waits[i], delays[i], strict=True):
            if j >= 0:
                tail[j] = max(tail[j], lasts[j] + tail[i] + delay)
                followers[j] -= 1
                if followers[j] == 0:
                    ready.append(j)
    return tail


def allocation_times(timeline: Timeline) -> Floats:
    """(n,) when each op takes its place in its program, in ms.

    Of a transfer, which allocates then, this is its start or, where it waits for its link, the start of the next op on
    the compute stream.
    """
    moment = timeline.start.copy()
    moving, device = timeline.rows.transfer.tolist(), timeline.device.tolist()
    next_start = dict.fromkeys(device, np.inf)
    for i in reversed(range(len(moment))):
        if moving[i]:
            moment[i] = min(moment[i], next_start[device[i]])
        else:
            next_start[device[i]] = moment[i]
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
