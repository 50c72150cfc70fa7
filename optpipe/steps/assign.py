"""Which documents share a micro-batch (`pack`), and which replica runs which micro-batches of a global batch in which
order (`assign`), so that the slowest replica ends soonest.

Both take a counted amount of search and no clock: all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from optpipe.dispatch.descents import StageRelief, first_waits, whole_reliefs
from optpipe.dispatch.figures import Choices, Figures, in_rows, memory_shares, new_state
from optpipe.errors import InputError, ScheduleError
from optpipe.model.arrays import Floats, Ints
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules
from optpipe.steps.cost_model import CostModel
from optpipe.text import distinct_sizes

MOST_SIMULATED = 600_000  # ops: three times as many gain a tenth of a percent
CHANGE = 24  # what a try costs besides, in ops
# How many micro-batches of each replica are light, and their share of the work of the others.
PROFILES = ((0, 1.0), (1, 0.25), (2, 0.1), (2, 0.25), (2, 0.4), (3, 0.4), (4, 0.4))
MOST_EXCHANGES = 1_000  # of documents
LEAST_GAIN = 1e-6  # of the work of a micro-batch: smaller differences are not worth an exchange


class StepMemoryError(InputError):
    """A micro-batch of a step needs more memory than a device has, in whatever order they run."""

    def __init__(self, message: str, microbatch: int, device: int) -> None:
        super().__init__(message)
        self.microbatch, self.device = microbatch, device

    def __reduce__(self) -> tuple[type[StepMemoryError], tuple[str, int, int]]:
        return type(self), (str(self), self.microbatch, self.device)


@dataclass(frozen=True)
class Assignment:
    """What each replica runs."""

    microbatches: tuple[tuple[int, ...], ...]  # by replica: numbers of the global batch, in the order of entry
    ms: tuple[float, ...]  # by replica: how long it takes by plain rules; a search may find a shorter schedule
    floor_ms: float  # the mean work of the busiest device over the replicas: no assignment is faster

    @property
    def slowest_ms(self) -> float:
        return max(self.ms)


class Packing(NamedTuple):
    """Documents in micro-batches."""

    documents: tuple[tuple[int, ...], ...]  # their numbers by micro-batch
    batch: Problem  # of these micro-batches
    assignment: Assignment


def assign(batch: Problem, replicas: int, counts: Sequence[int] | None = None, free: bool = False) -> Assignment:
    """Put the micro-batches of a global batch on replicas and order them.

    Longest work first (Graham 1969), then a local search that lists the ops of the replicas whose micro-batches change.

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

    Raises
    ------
    InputError
        If the numbers do not match, or a micro-batch fits no device by itself.
    ScheduleError
        If no order is known in which a replica's micro-batches fit.
    """
    from optpipe.dispatch.descend import exchange  # imports numba

    each = _counts(batch, replicas, counts, free)
    require_room(batch)
    work = batch.costs.work_ms
    order, each = _longest_first(work, each, free)
    figures, most = Figures.from_problem(batch), order.shape[1]
    state, ms = new_state(figures, most), np.zeros(replicas)

    def slowest_ms(rules: Rules) -> float:
        exchange(figures, rules, state, order, each, ms, 0, False)
        return float(ms.max())

    rules = min(plain_rules(batch, order[0]), key=slowest_ms)
    tries = MOST_SIMULATED // (3 * len(batch.stages) * int(each.max()) + CHANGE)
    exchange(figures, rules, state, order, each, ms, tries, free)
    if not np.isfinite(ms).all():
        raise ScheduleError("no order of these micro-batches is known in which each replica's fit its devices")
    placed = tuple(tuple(row[:n]) for row, n in zip(order.tolist(), each.tolist(), strict=True))
    return Assignment(placed, tuple(ms.tolist()), float(work.sum(axis=1).max()) / replicas)


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


def _longest_first(work: Floats, counts: Ints, free: bool) -> tuple[Ints, Ints]:
    """The heaviest micro-batch goes to the replica with the least work that has a place left; then light ones enter
    first and last. Returns (R, most) the micro-batches of each replica, and (R,) how many each has."""
    total = work.sum(axis=0)
    replicas, most = len(counts), len(total) if free else int(counts.max())
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


def plain_rules(batch: Problem, order: Ints) -> Iterator[Rules]:
    """Yields rules that share memory among stages."""
    choices, stages, most = Choices.from_problem(batch), len(batch.stages), len(order)
    shares = [in_flight.clip(1, most) for in_flight in memory_shares(batch)]
    shares += [np.minimum(shares[0], stages - np.arange(stages)), np.ones(stages, np.int64)]
    for relief in (StageRelief.none(stages), *whole_reliefs(choices)):
        for wait_ms in first_waits(choices):
            for in_flight in shares:
                yield in_rows(Rules(in_flight, wait_ms, *relief.of_each(most), choices.carry_ms, order))


def require_room(problem: Problem) -> None:
    """Raises StepMemoryError, about the micro-batch that needs most, if one does not fit on a device by itself.

    While a stage runs F, all of its activation is there, and of each stage that the micro-batch has passed before on
    the same device what an offload, an eviction or a recompute leaves.
    """
    costs, levels = problem.costs, problem.costs.levels
    left = costs.activation.copy()
    has_level = levels.count > np.arange(len(levels.checkpoint))[:, None]
    for possible, kept in (
        (costs.can_offload, costs.activation - costs.offload),
        *zip(has_level, levels.checkpoint - levels.offload, strict=True),
        (costs.can_evict, costs.activation - costs.evict),
    ):
        left = np.where(possible[:, None], np.minimum(left, kept), left)
    least, passed = np.zeros((2, len(problem.devices), problem.microbatches), dtype=np.int64)
    for r, route in enumerate(problem.all_routes):
        takes = costs.route == r
        for s in route:
            d = costs.device[s]
            least[d] = np.where(takes, np.maximum(least[d], passed[d] + costs.activation[s]), least[d])
            passed[d] += np.where(takes, left[s], 0)
    lacking = least - costs.activation_budget[:, None]
    if (lacking <= 0).all():
        return
    device, microbatch = (int(i) for i in np.unravel_index(int(lacking.argmax()), least.shape))
    needed, limit = distinct_sizes(int(least[device, microbatch]), int(costs.activation_budget[device]))
    raise StepMemoryError(
        f"devices[{device}].activation_budget_bytes = {limit}: micro-batch {microbatch} by itself needs at least "
        f"{needed}",
        microbatch,
        device,
    )


def pack(
    documents: Sequence[Mapping[str, float]],
    microbatches: int,
    limits: Mapping[str, float],
    problem: Callable[[Sequence[Mapping[str, float]]], Problem],
    costs: CostModel,
    replicas: int = 1,
) -> Packing:
    """Put the documents of a global batch into micro-batches, and those on replicas.

    What a micro-batch takes is the sum of what its documents take and a constant, so all packings have the same work.
    Light micro-batches fill and empty a pipeline quickly, and equal ones between them keep it busy: some of each
    replica are lighter than the others. Longest work first on micro-batches of given shares (Graham 1969; Gonzalez,
    Ibarra and Sahni 1977), then documents change micro-batches; `assign` decides which shares are best.

    Parameters
    ----------
    documents
        The features of each, such as its tokens and the square of its length. A micro-batch has the sums.
    microbatches
        How many there are, of all replicas together.
    limits
        The most of a feature that a micro-batch may have, such as `{"tokens": 8192}`.
    problem
        Makes the problem of micro-batches with these features: `functools.partial(costs.problem, template)` with a
        template as of a `StepScheduler`, or in a training `PlannedSteps.problem`.
    costs
        What each document adds to times.
    replicas
        As of `assign`.

    Raises
    ------
    InputError
        If the documents do not fit, or a feature is missing.
    ScheduleError
        If no order is known in which a replica's micro-batches fit.
    """
    if not 1 <= microbatches <= len(documents):
        raise InputError(f"microbatches = {microbatches}: from 1 to the {len(documents)} documents were expected")
    work, sizes = costs.added_ms(documents), _sizes(documents, limits, costs)
    most = np.array(list(limits.values()), dtype=np.float64)
    packings = []
    for light, share in PROFILES:
        if 2 * light * replicas > microbatches:
            continue
        shares = np.where(np.arange(microbatches) < light * replicas, share, 1.0)
        packed = _largest_first(work, sizes, shares, most)
        _exchange_documents(packed, work, sizes, shares, most)
        chosen = tuple(tuple(np.flatnonzero(packed == j).tolist()) for j in range(microbatches))
        batch = problem([{name: sum(documents[i][name] for i in each) for name in costs.features} for each in chosen])
        packings.append(Packing(chosen, batch, assign(batch, replicas)))
    return min(packings, key=lambda packing: packing.assignment.slowest_ms)


def _sizes(documents: Sequence[Mapping[str, float]], limits: Mapping[str, float], costs: CostModel) -> Floats:
    """(n, limits) what each document has of what is limited."""
    for name, most in limits.items():
        if name not in costs.features:
            raise InputError(f"limits.{name}: expected one of the features {', '.join(costs.features)}")
        if not most > 0:
            raise InputError(f"limits.{name} = {most:g}: a number above 0 was expected")
    sizes = np.zeros((len(documents), len(limits)))
    for i, document in enumerate(documents):
        for k, (name, most) in enumerate(limits.items()):
            if document[name] > most:
                raise InputError(f"documents[{i}].{name} = {document[name]:g}: a micro-batch may have {most:g}")
            sizes[i, k] = document[name]
    return sizes


def _largest_first(work: Floats, sizes: Floats, shares: Floats, most: Floats) -> Ints:
    """(n,) the micro-batch of each document: of those with room, the one that then has least for its share. Where none
    is left, the largest documents come first, each where the least room stays."""
    for by_size in (False, True):
        load, room = np.zeros(len(shares)), np.tile(most, (len(shares), 1))
        packed = np.full(len(work), -1)
        filled = (sizes / most).max(axis=1, initial=0.0) if by_size else work
        for i in np.argsort(-filled, kind="stable").tolist():
            fits = (sizes[i] <= room).all(axis=1)
            if not fits.any():
                break
            least = (room / most).min(axis=1, initial=inf) if by_size else (load + work[i]) / shares
            j = int(np.where(fits, least, inf).argmin())
            packed[i] = j
            load[j] += work[i]
            room[j] -= sizes[i]
        if (packed >= 0).all():
            return packed
    raise InputError(
        f"microbatches = {len(shares)}: no way is known to put {len(work)} documents into them within limits"
    )


def _exchange_documents(packed: Ints, work: Floats, sizes: Floats, shares: Floats, most: Floats) -> None:
    """The micro-batch with most work for its share gives a document to another one, or changes one for another, so that
    the larger of the two becomes smallest; in place. Ends when none becomes smaller."""
    load = np.bincount(packed, work, len(shares))
    held = np.zeros((len(shares), sizes.shape[1]))
    np.add.at(held, packed, sizes)
    for _ in range(MOST_EXCHANGES):
        j = int((load / shares).argmax())
        mine, others = np.flatnonzero(packed == j), np.flatnonzero(packed != j)
        # The last column gives a document for none, to the micro-batch with the least work.
        target = np.append(packed[others], int((load / shares).argmin()))
        change = work[mine][:, None] - np.append(work[others], 0.0)
        larger = np.maximum((load[j] - change) / shares[j], (load[target] + change) / shares[target])
        resized = sizes[mine][:, None] - np.vstack([sizes[others], np.zeros_like(most)])
        larger[((held[target] + resized > most) | (held[j] - resized > most)).any(axis=2)] = inf
        if len(mine) == 1:
            larger[:, -1] = inf  # no micro-batch becomes empty
        a, b = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[a, b] >= load[j] / shares[j] * (1 - LEAST_GAIN):
            return
        other = int(target[b])
        packed[mine[a]] = other
        if b < len(others):
            packed[others[b]] = j
        load[[j, other]] += np.array([-1, 1]) * change[a, b]
        held[[j, other]] += np.array([[-1], [1]]) * resized[a, b]
