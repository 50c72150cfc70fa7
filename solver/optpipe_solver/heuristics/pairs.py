"""Pairs: a forward and a backward that take less time together are joined if they are neighbours in a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import add

import numpy as np

from optpipe.lift import TOLERANCE_MS
from optpipe.model.figures import each_microbatch
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, Program
from optpipe.schedule import Schedule, check


def with_fused_backwards(problem: Problem) -> Problem:
    """The problem in which B does what B and W do: a forward finds more to run with in it."""
    return problem.replace(
        stages=[
            stage.model_copy(
                update={
                    "backward_input_ms": each_microbatch(add, stage.backward_input_ms, stage.backward_weight_ms),
                    "backward_weight_ms": 0.0,
                    "saved_for_weight_bytes": 0,
                }
            )
            for stage in problem.stages
        ]
    )


def in_pairs_or_not(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """Yield a schedule of the problem, or of that with fused backwards, as one of the problem, then with pairs."""
    if schedule.problem is not problem:
        programs = []
        for program in schedule.programs:
            table = program.table[program.table[:, KIND] != Kind.W].copy()
            table[table[:, KIND] == Kind.B, KIND] = Kind.BW
            programs.append(Program(table))
        schedule = replace(schedule, problem=problem, programs=tuple(programs), rules=None)
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
    forward, backward = rows.of_kinds(Kind.F), rows.of_kinds(*BACKWARD)
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
