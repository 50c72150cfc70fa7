"""`pack`: which documents share a micro-batch, so that the slowest replica ends soonest.

What a micro-batch takes is the sum of what its documents take and a constant, so all packings have the same work. Light
micro-batches fill and empty a pipeline quickly, and equal ones between them keep it busy: some of each replica are
lighter than the others. Longest work first on micro-batches of given shares (Graham 1969; Gonzalez, Ibarra and Sahni
1977), then documents change micro-batches; `assign` says which shares are best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats, Ints
from optpipe.model.problem import Problem
from optpipe.steps.assign import Assignment, assign
from optpipe.steps.cost_model import CostModel

# How many micro-batches of each replica are light, and their share of the work of the others.
PROFILES = ((0, 1.0), (1, 0.25), (2, 0.1), (2, 0.25), (2, 0.4), (3, 0.4), (4, 0.4))
MOST_EXCHANGES = 1_000
LEAST_GAIN = 1e-6  # of the work of a micro-batch: smaller differences are not worth an exchange


class Packing(NamedTuple):
    """Documents in micro-batches.

    Attributes
    ----------
    documents
        By micro-batch: the numbers of its documents.
    batch
        The problem of these micro-batches.
    assignment
        Which replica runs which of them.
    """

    documents: tuple[tuple[int, ...], ...]
    batch: Problem
    assignment: Assignment


def pack(
    documents: Sequence[Mapping[str, float]],
    microbatches: int,
    limits: Mapping[str, float],
    problem: Callable[[Sequence[Mapping[str, float]]], Problem],
    costs: CostModel,
    replicas: int = 1,
) -> Packing:
    """Put the documents of a global batch into micro-batches, and those on replicas.

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

    Returns
    -------
    Packing
        It takes a counted amount of search and no clock: all ranks compute the same.

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
    for shares in _profiles(microbatches, replicas):
        packed = _longest_first(work, sizes, shares, most)
        _exchange(packed, work, sizes, shares, most)
        chosen = tuple(tuple(np.flatnonzero(packed == j).tolist()) for j in range(microbatches))
        batch = problem([_sum(documents, each, costs.features) for each in chosen])
        packings.append(Packing(chosen, batch, assign(batch, replicas)))
    return min(packings, key=lambda packing: packing.assignment.slowest_ms)


def _profiles(microbatches: int, replicas: int) -> Iterator[Floats]:
    """Yields (microbatches,) shares of work."""
    for light, share in PROFILES:
        if 2 * light * replicas <= microbatches:
            yield np.where(np.arange(microbatches) < light * replicas, share, 1.0)


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


def _longest_first(work: Floats, sizes: Floats, shares: Floats, most: Floats) -> Ints:
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


def _exchange(packed: Ints, work: Floats, sizes: Floats, shares: Floats, most: Floats) -> None:
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


def _sum(documents: Sequence[Mapping[str, float]], chosen: Sequence[int], features: Sequence[str]) -> dict[str, float]:
    return {name: sum(documents[i][name] for i in chosen) for name in features}
