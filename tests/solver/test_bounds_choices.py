"""The bound over all choices for whole activations: the least of every combination, and below every schedule."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import best_of_all, problem_of, stage
from support.examples import examples

from optpipe import Problem
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.choices import MOST, least_of_all

COSTS = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=3)


@settings(max_examples=examples(100), deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 3), COSTS), min_size=1, max_size=2),
    fixed=st.tuples(*[st.integers(0, 5)] * 4),
    once=st.tuples(st.just(0), st.integers(0, 3), st.integers(0, 3), st.just(0)),
)
def test_it_is_the_least_of_every_combination(groups, fixed, once):
    each = [costs for count, costs in groups for _ in range(count)]
    best = min(
        max(total + f + (o if total else 0) for total, f, o in zip(np.sum(chosen, axis=0), fixed, once, strict=True))
        for chosen in product(*each)
    )
    as_arrays = [(count, np.array(costs, dtype=float)) for count, costs in groups]
    assert least_of_all(as_arrays, np.array(fixed), np.array(once)) == best


def test_too_many_combinations_are_not_tried():
    choices = np.array([[3.0, 0, 0, 0], [2, 1, 1, 0], [1, 0, 0, 1]])
    assert least_of_all([(MOST, choices)], np.zeros(4), np.zeros(4)) == 0.0


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """One device, two micro-batches, memory for one or two: activations leave, are recomputed, or stay."""
    ms, size = st.integers(0, 4), draw(st.integers(1, 3))
    away = (draw(ms), draw(ms), draw(st.integers(1, size))) if draw(st.booleans()) else None
    again = (draw(ms), draw(st.integers(0, size))) if away is None or draw(st.integers(0, 2)) == 0 else None
    stages = [stage(0, (draw(ms), draw(ms), draw(ms)), size, draw(st.integers(0, size)), away, again)]
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    return problem_of(stages, [size + draw(st.integers(0, size))], 2, 0.0, transfer_mode=duplex)


@settings(max_examples=examples(24), deadline=None)
@given(problem=tiny())
def test_no_schedule_is_shorter(problem):
    for objective in ("makespan", "span"):
        assert memory_bound(problem, objective) <= best_of_all(problem, objective)[0] + 1e-9


@pytest.mark.parametrize(("name", "bound"), [("slowlink-8x16", 820.0), ("recompute-4x12", 458.5)])
def test_where_it_is_above_any_mixture_of_choices(name: str, bound: float) -> None:
    """Mixtures, such as half of an activation that leaves, allow for less: 793 and 451.5 ms."""
    problem = Problem.load(Path(__file__).parents[2] / f"examples/problems/{name}.json")
    assert memory_bound(problem) == pytest.approx(bound)
