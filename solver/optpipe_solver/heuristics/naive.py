"""One micro-batch at a time: it fits wherever any schedule does, and needs no clock, so it is there at once."""

from __future__ import annotations

import numpy as np

from optpipe.model.arrays import Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.bounds.least_memory import Relief, reliefs


def one_at_a_time(problem: Problem, method: str) -> Schedule:
    """Schedule each micro-batch after the one before it, and offload or recompute no more than memory demands.

    All programs and shared links keep one order of all ops, so nothing deadlocks.
    """
    passes = [_one_pass(problem.route(j), reliefs(problem, j)) for j in problem.costs.representatives.tolist()]
    rows_of = [passes[alike] for alike in problem.costs.class_of.tolist()]
    kind, stage, part = np.concatenate(rows_of).T
    microbatch = np.repeat(np.arange(problem.microbatches), [len(rows) for rows in rows_of])
    table: Table = np.stack([kind, stage, microbatch, part, np.zeros_like(kind)], axis=1).astype(np.int32)
    return Schedule.in_order(problem, table, method=method)


def _one_pass(route: tuple[int, ...], relief: dict[int, Relief]) -> list[tuple[int, int, int]]:
    """Return kind, stage and part of every op of one micro-batch.

    An activation leaves right after its forward and is back right before its backward.
    """
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
