"""`prune`: let go of offloads that buy nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optpipe.evaluate.graph import is_transfer
from optpipe.evaluate.memory import device_bytes
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.program import PART, STAGE, Program
from optpipe.schedule import Schedule


def prune(schedule: Schedule) -> Schedule:
    """The same without the offloads whose bytes fit all the time. Nothing starts later, since fewer ops wait for each
    other.

    Those go first that keep compute waiting longest: a drop for its offload's end, a backward for its reload's.
    """
    problem, timeline = schedule.problem, schedule.timeline
    table, device = timeline.table, timeline.device
    taken, freed = device_bytes(problem, table)
    size = problem.costs.part_bytes(table[:, STAGE], table[:, PART])
    keep = np.ones(len(table), dtype=np.bool_)
    for d, limit in enumerate(problem.costs.activation_budget.tolist()):
        own = np.flatnonzero(device == d)
        during = np.cumsum(taken[own]) - np.cumsum(freed[own]) + freed[own]
        waits = _waits(table[own], timeline.start[own], timeline.end[own])
        place = {tuple(row): i for i, row in enumerate(table[own, :4].tolist())}
        offloads = []  # wait, and the rows of O, D and R
        for (kind, stage, microbatch, part), i in place.items():
            if kind == Kind.O:
                drop, reload = (place[other, stage, microbatch, part] for other in (Kind.D, Kind.R))
                backward = next(place[b, stage, microbatch, 0] for b in BACKWARD if (b, stage, microbatch, 0) in place)
                offloads.append((max(waits[drop], waits[backward]), i, drop, reload))
        for _, i, drop, reload in sorted(offloads, key=lambda offload: -offload[0]):
            away = slice(drop + 1, reload)
            if during[away].max(initial=0) + size[own[i]] <= limit:
                during[away] += size[own[i]]
                keep[own[[i, drop, reload]]] = False
    return schedule if keep.all() else _only(schedule, table, device, keep)


def _waits(table: NDArray[np.int32], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) how long one device's compute stream stood still before each of its ops; 0 for transfers."""
    waits = np.zeros(len(table))
    stream = np.flatnonzero(~is_transfer(table))
    waits[stream[1:]] = start[stream[1:]] - end[stream[:-1]]
    return waits


def _only(schedule: Schedule, table: NDArray[np.int32], device: NDArray[np.int64], keep: NDArray[np.bool_]) -> Schedule:
    """The schedule's rows that are marked."""
    kept = {tuple(row) for row in table[keep, :4].tolist()}
    links = {
        link: Program(order.table[[tuple(row) in kept for row in order.table[:, :4].tolist()]])
        for link, order in schedule.links.items()
    }
    return replace(
        schedule,
        programs=tuple(Program(table[(device == d) & keep]) for d in range(len(schedule.problem.devices))),
        links={link: order for link, order in links.items() if len(order)},
    )
