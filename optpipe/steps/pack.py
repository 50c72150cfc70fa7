"""`pack`: which documents share a micro-batch, so that the slowest replica ends soonest.

What a micro-batch takes is the sum of what its documents take and a constant, so all orders have the same work, and
those of micro-batches that take equally long have the shortest fill and drain. Longest work first (Graham 1969), then
documents change micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats, Ints
from optpipe.model.problem import Problem
from optpipe.steps.assign import Assignment, assign, work_ms
from optpipe.steps.cost_model import CostModel

MOST_EXCHANGES = 2_000
LEAST_GAIN = 1e-6  # of the work of a micro-batch: smaller differences are not worth an exchange


class Packing(NamedTuple):
    """Documents in micro-batches.

    Attributes
    ----------
    documents
        By micro-batch: the numbers of its documents.
    batch
        The template with these micro-batches, whose figures the cost model predicts.
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
    template: Problem,
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
    template, costs
        As of a `StepScheduler`.
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
    sizes = _sizes(documents, limits, costs)
    work = work_ms(costs.problem(template, [*documents, dict.fromkeys(costs.features, 0.0)])).sum(axis=0)
    work = work[:-1] - work[-1]
    most = np.array(list(limits.values()), dtype=np.float64)
    packed = _longest_first(work, sizes, microbatches, most)
    _exchange(packed, work, sizes, microbatches, most)
    chosen = tuple(tuple(np.flatnonzero(packed == j).tolist()) for j in range(microbatches))
    batch = costs.problem(template, [_sum(documents, each, costs.features) for each in chosen])
    return Packing(chosen, batch, assign(batch, replicas))


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
            if name not in document:
                raise InputError(f"documents[{i}].{name} is missing: it is limited")
            if document[name] > most:
                raise InputError(f"documents[{i}].{name} = {document[name]:g}: a micro-batch may have {most:g}")
            sizes[i, k] = document[name]
    return sizes


def _longest_first(work: Floats, sizes: Floats, microbatches: int, most: Floats) -> Ints:
    """(n,) the micro-batch of each document: that with the least work of those with room. Where none is left, the
    largest documents come first, each where the least room stays."""
    for by_size in (False, True):
        load, room = np.zeros(microbatches), np.tile(most, (microbatches, 1))
        packed = np.full(len(work), -1)
        filled = (sizes / most).max(axis=1, initial=0.0) if by_size else work
        for i in np.argsort(-filled, kind="stable").tolist():
            fits = (sizes[i] <= room).all(axis=1)
            if not fits.any():
                break
            least = (room / most).min(axis=1, initial=inf) if by_size else load
            j = int(np.where(fits, least, inf).argmin())
            packed[i] = j
            load[j] += work[i]
            room[j] -= sizes[i]
        if (packed >= 0).all():
            return packed
    raise InputError(
        f"microbatches = {microbatches}: no way is known to put {len(work)} documents into them within limits"
    )


def _exchange(packed: Ints, work: Floats, sizes: Floats, microbatches: int, most: Floats) -> None:
    """The micro-batch with most work gives a document to another one, or changes one for another, so that the two come
    closest; in place. Ends when none comes closer."""
    load = np.bincount(packed, work, microbatches)
    held = np.zeros((microbatches, sizes.shape[1]))
    np.add.at(held, packed, sizes)
    for _ in range(MOST_EXCHANGES):
        j = int(load.argmax())
        mine = np.flatnonzero(packed == j)
        others = np.flatnonzero(packed != j)
        # The last column gives a document for none, to the micro-batch with the least work.
        target = np.append(packed[others], int(load.argmin()))
        back_work, back_size = np.append(work[others], 0.0), np.vstack([sizes[others], np.zeros_like(most)])
        moved = work[mine][:, None] - back_work
        gap = load[j] - load[target]
        gain = np.where((moved > 0) & (moved < gap), np.minimum(moved, gap - moved), 0.0)
        change = sizes[mine][:, None] - back_size
        gain[((held[target] + change > most) | (held[j] - change > most)).any(axis=2)] = 0.0
        if len(mine) == 1:
            gain[:, -1] = 0.0  # no micro-batch becomes empty
        a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[a, b] <= LEAST_GAIN * load[j]:
            return
        other = int(target[b])
        packed[mine[a]] = other
        if b < len(others):
            packed[others[b]] = j
        load[j] -= moved[a, b]
        load[other] += moved[a, b]
        held[j] -= change[a, b]
        held[other] += change[a, b]


def _sum(documents: Sequence[Mapping[str, float]], chosen: Sequence[int], features: Sequence[str]) -> dict[str, float]:
    return {name: sum(documents[i][name] for i in chosen) for name in features}
