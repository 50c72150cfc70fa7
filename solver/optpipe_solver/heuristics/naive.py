"""One micro-batch at a time, written down without a clock: there at once however large the problem, and wherever any
schedule fits."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.graph import Table, is_transfer
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import STAGE, Program
from optpipe.schedule import Schedule
from optpipe_solver.bounds.least_memory import Relief, reliefs


def in_turn(problem: Problem, method: str) -> Schedule:
    """Each micro-batch begins behind the one before it in every program, and leaves or computes again no more than
    memory demands.

    All programs and shared links keep one order of all ops, so nothing deadlocks.
    """
    passes = [_one_pass(route, reliefs(problem, route)) for route in problem.all_routes]
    mine = [passes[r] for r in problem.costs.route.tolist()]
    kind, stage, part = np.concatenate(mine).T
    microbatch = np.repeat(np.arange(problem.microbatches), [len(rows) for rows in mine])
    table: Table = np.stack([kind, stage, microbatch, part, np.zeros_like(kind)], axis=1).astype(np.int32)
    device, transfer = problem.costs.device[table[:, STAGE]], is_transfer(table)
    programs = tuple(Program(table[device == d]) for d in range(len(problem.devices)))
    links = {
        link: Program(table[transfer & np.isin(device, sharers)]) for link, sharers in problem.shared_links.items()
    }
    return Schedule(problem, programs, {link: order for link, order in links.items() if len(order)}, method)


def _one_pass(route: tuple[int, ...], relief: dict[int, Relief]) -> list[tuple[int, int, int]]:
    """Kind, stage and part of every op of one micro-batch: an activation leaves right after its forward and is back for
    its backward."""
    there = [[(Kind.F, s, 0), *((kind, s, p) for kind in (Kind.O, Kind.D) for p in relief[s].parts)] for s in route]
    back = [
        [
            *((Kind.R, s, p) for p in relief[s].parts),
            *([(Kind.C, s, 0)] if relief[s].recompute else []),
            (Kind.BW, s, 0),
        ]
        for s in reversed(route)
    ]
    return [row for rows in (*there, *back) for row in rows]
