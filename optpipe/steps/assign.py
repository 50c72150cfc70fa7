"""`assign`: which replica runs which micro-batches of a global batch, in which order, so that the slowest ends soonest.

Longest work first (Graham 1969), then a local search that lists the ops of the replicas whose micro-batches change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from optpipe.dispatch.figures import Choices, Figures, in_rows, memory_shares
from optpipe.dispatch.starts import StageRelief, first_waits, whole_reliefs
from optpipe.dispatch.state import new_state
from optpipe.errors import InputError, ScheduleError
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules
from optpipe.steps.memory import require_room

MOST_SIMULATED = 600_000  # ops: three times as many gain a tenth of a percent
CHANGE = 24  # what a try costs besides, in ops


@dataclass(frozen=True)
class Assignment:
    """What each replica runs.

    Attributes
    ----------
    microbatches
        By replica: numbers of the global batch, in the order in which they enter.
    ms
        By replica: how long it takes by plain rules. A search for its schedule may find a shorter one.
    floor_ms
        The mean work of the busiest device over the replicas: no assignment is faster.
    """

    microbatches: tuple[tuple[int, ...], ...]
    ms: tuple[float, ...]
    floor_ms: float

    @property
    def slowest_ms(self) -> float:
        return max(self.ms)


def assign(batch: Problem, replicas: int, counts: Sequence[int] | None = None, free: bool = False) -> Assignment:
    """Put the micro-batches of a global batch on replicas and order them.

    Parameters
    ----------
    batch
        The template with all micro-batches of the global batch.
    replicas
        How many pipelines there are, all alike.
    counts
        How many micro-batches each replica has; equal numbers by default.
    free
        Whether other numbers may result, as where the loss weighs each micro-batch by its tokens.

    Returns
    -------
    Assignment
        It takes a counted amount of search and no clock: all ranks compute the same.

    Raises
    ------
    InputError
        If the numbers do not match, or a micro-batch fits no device by itself.
    ScheduleError
        If no order is known in which a replica's micro-batches fit.
    """
    each = _counts(batch, replicas, counts, free)
    require_room(batch)
    order, each = _longest_first(batch, each, free)
    rules, figures = _shortest_rules(batch, order, each)
    order, each, ms = _exchanged(batch, figures, rules, order, each, free)
    if not np.isfinite(ms).all():
        raise ScheduleError("no order of these micro-batches is known in which each replica's fit its devices")
    placed = tuple(tuple(row[:n]) for row, n in zip(order.tolist(), each.tolist(), strict=True))
    return Assignment(placed, tuple(ms.tolist()), float(work_ms(batch).sum(axis=1).max()) / replicas)


def _counts(batch: Problem, replicas: int, counts: Sequence[int] | None, free: bool) -> Ints:
    m = batch.microbatches
    if len(batch.all_routes) > 1:
        raise InputError(f"routes has {len(batch.all_routes)} entries: micro-batches of one route are assigned")
    if not 1 <= replicas <= m:
        raise InputError(f"replicas = {replicas}: from 1 to the {m} micro-batches of the batch were expected")
    if counts is None:
        if m % replicas and not free:
            raise InputError(
                f"replicas = {replicas}: {m} micro-batches cannot be divided equally; give counts, or free=True"
            )
        return m // replicas + (np.arange(replicas) < m % replicas).astype(np.int64)
    if len(counts) != replicas or min(counts) < 1 or sum(counts) != m:
        raise InputError(f"counts = {list(counts)}: {replicas} numbers of at least 1 with the sum {m} were expected")
    return np.array(counts, dtype=np.int64)


def work_ms(batch: Problem) -> Floats:
    """(D, m) how long each micro-batch keeps each device busy."""
    costs = batch.costs
    work = np.zeros((len(batch.devices), batch.microbatches))
    np.add.at(work, costs.device, costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=0))
    return work


def _longest_first(batch: Problem, counts: Ints, free: bool) -> tuple[Ints, Ints]:
    """The heaviest micro-batch goes to the replica with the least work that has a place left; then light ones enter
    first and last."""
    work = work_ms(batch)
    total = work.sum(axis=0)
    replicas, most = len(counts), batch.microbatches if free else int(counts.max())
    loads, sizes = np.zeros((replicas, len(work))), np.zeros(replicas, dtype=np.int64)
    rows: list[list[int]] = [[] for _ in range(replicas)]
    for j in np.argsort(-total, kind="stable").tolist():
        loaded = (loads + work[:, j]).max(axis=1)
        loaded[sizes >= (most if free else counts)] = inf
        r = int(np.lexsort((counts, sizes, loaded))[0])
        rows[r].append(j)
        loads[r] += work[:, j]
        sizes[r] += 1
    order = np.zeros((replicas, most), dtype=np.int64)
    for row, items in zip(order, rows, strict=True):
        rising = items[::-1]
        row[: len(items)] = rising[::2] + rising[1::2][::-1]
    return order, sizes


def _shortest_rules(batch: Problem, order: Ints, counts: Ints) -> tuple[Rules, Figures]:
    """Of rules that share memory among stages those by which the slowest replica ends soonest."""
    from optpipe.dispatch.descend import exchange  # imports numba

    figures, choices, stages = Figures.from_problem(batch), Choices.from_problem(batch), len(batch.stages)
    most = order.shape[1]
    state = new_state(figures, most)
    shares = [in_flight.clip(1, most) for in_flight in memory_shares(batch)]
    shares += [np.minimum(shares[0], stages - np.arange(stages)), np.ones(stages, np.int64)]
    all_rules = [
        in_rows(Rules(in_flight, wait_ms, *relief.of_each(most), choices.carry_ms, order[0]))
        for relief in (StageRelief.none(stages), *whole_reliefs(choices))
        for wait_ms in first_waits(choices)
        for in_flight in shares
    ]

    def slowest_ms(rules: Rules) -> float:
        ms = np.zeros(len(order))
        exchange(figures, rules, state, order, counts, ms, 0, False)
        return float(ms.max())

    return min(all_rules, key=slowest_ms), figures


def _exchanged(
    batch: Problem, figures: Figures, rules: Rules, order: Ints, counts: Ints, free: bool
) -> tuple[Ints, Ints, Floats]:
    """The local search, until `MOST_SIMULATED` ops are listed."""
    from optpipe.dispatch.descend import exchange  # imports numba

    ms, listed = np.zeros(len(order)), 3 * len(batch.stages) * int(counts.max())
    tries = MOST_SIMULATED // (listed + CHANGE)
    exchange(figures, rules, new_state(figures, order.shape[1]), order, counts, ms, tries, free)
    return order, counts, ms
