"""The integer grid: whole where that is cheap, and never too fine to count."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles.enumeration import problem_of, stage

from optpipe import Kind, Op
from optpipe.evaluate.effects import Effects
from optpipe.model.arrays import NONE
from optpipe.model.records import Level
from optpipe_solver.cpsat.grid import BACKWARDS, LONGEST, Grid
from optpipe_solver.exact import common_step_ms

times = st.sampled_from([0.0, 5e-324, 1e-9, 0.1, 1 / 3, 7.25, 1e6, 1e12])


@settings(max_examples=examples(200))
@given(st.lists(times, min_size=7, max_size=7), st.integers(1, 3), st.integers(1, 2**16))
def test_no_times_are_too_far_apart(ms: list[float], parts: int, microbatches: int) -> None:
    f, b, w, o, r, c, p2p = ms
    problem = problem_of([stage(0, (f, b, w), 9, 1, (o, r, 9), (c, 1), parts)] * 2, [9], microbatches, p2p)
    grid = Grid.for_problem(problem)
    assert grid.serial < 2 * LONGEST
    for kind, least in zip((Kind.F, Kind.B, Kind.W, Kind.C), (f, b, w, c), strict=True):
        assert grid.duration(Op(kind, 0, 0)) >= 1
        assert grid.ms(grid.duration(Op(kind, 0, 0))) >= least * (1 - 1e-12)


@given(
    st.lists(times, min_size=7, max_size=7), st.lists(st.integers(0, 2**53), min_size=4, max_size=4), st.integers(1, 3)
)
def test_for_bounds_nothing_is_rounded_up(ms: list[float], sizes: list[int], parts: int) -> None:
    f, b, w, o, r, c, p2p = ms
    leaves, checkpoint, held, kept = sizes[0] % (sizes[2] + 1), sizes[1] % (sizes[2] + 1), sizes[2], sizes[3]
    problem = problem_of(
        [stage(0, (f, b, w), held, kept, (o, r, leaves), (c, checkpoint), parts)] * 2, [2**50 + 1], 3, p2p
    )
    figures = {"recompute_ms": c, "offload_ms": r, "reload_ms": o, "offload_bytes": min(leaves, checkpoint)}
    level = Level(name="cheap", checkpoint_bytes=checkpoint, **figures)
    one = problem.stages[0].model_copy(update={"recompute_ms": None, "checkpoint_bytes": None, "levels": (level,)})
    problem = problem.replace(stages=[one, problem.stages[1]])
    grid = Grid.for_problem(problem).relaxed
    ops = [Op(kind, 0, 0) for kind in (Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R)]
    ops += [Op(kind, 0, 0, parts) for kind in (Kind.O, Kind.R)]  # the first part of the checkpoint
    for op, most in zip(ops, (f, b, w, c, o / parts, r / parts, r / parts, o / parts), strict=True):
        assert grid.ms(grid.duration(op)) <= most * (1 + 1e-12)
    assert grid.ms(grid.forward_delay(1, 0)) <= p2p
    assert sorted(grid.parts(0, 0)) == list(range(2 * parts))  # those of the activation, then of the checkpoint
    for of_level, nbytes in ((NONE, leaves), (0, min(leaves, checkpoint))):
        sizes = [size for p, size in grid.parts(0, 0).items() if grid.level_of_part(0, p) == of_level]
        assert sum(sizes) * grid.grain <= nbytes
    exact = Effects(problem)
    for kinds in BACKWARDS:
        for of_level in (NONE, 0):
            again = (Kind.C,) * (of_level == 0)
            each = [of.holdings(0, 0, Kind.F, *again, *kinds, level=of_level) for of in (grid, exact)]
            assert all(down.bytes * grid.grain <= held.bytes for down, held in zip(*each, strict=True))
    assert grid.lossless or grid.down


def test_what_is_whole_stays_so() -> None:
    grid = Grid.for_problem(problem_of([stage(0, (10.35, 11.5, 9.2), 5)], [5], 2, 0.5))
    assert grid.exact
    assert [grid.duration(Op(kind, 0, 0)) for kind in (Kind.F, Kind.B, Kind.W)] == [9, 10, 8]  # of 1.15 ms
    assert not Grid.for_problem(problem_of([stage(0, (10.0, 11.5, 0.0), 5)], [5], 2)).exact  # W must take a tick
    problem = problem_of([stage(0, (0.1, 0.2, 0.4), 5, again=(0.1, 1))], [5], 2)  # as floats 0.7000000000000001
    grid = Grid.for_problem(problem, 7)
    assert (grid.exact, grid.serial) == (True, 2 * (1 + 2 + 4 + 1))
    some_take_none = problem.stages[0].model_copy(update={"recompute_ms": (0.1, 0.0)})
    assert not Grid.for_problem(problem.replace(stages=[some_take_none])).exact


@pytest.mark.parametrize(
    ("more", "p2p"), [({}, 0.5), ({"away": (2, 4, 4), "parts": 4}, 2.0), ({"again": (0.5, 1)}, 2.0)]
)
def test_messages_parts_and_recomputation_are_multiples_of_the_step(more: dict[str, Any], p2p: float) -> None:
    problem = problem_of([stage(d, (2, 4, 2), 5, **more) for d in range(2)], [9, 9], 2, p2p)
    assert common_step_ms(problem) == Fraction(1, 2)


@pytest.mark.parametrize("size", [1, 10**4, 2**53])
def test_sizes_beyond_every_device_are_counted_no_further(size: int) -> None:
    grid = Grid.for_problem(problem_of([stage(0, (1, 1, 1), 2**53, 1), stage(0, (1, 1, 1), 7, 7)], [size], 2))
    forward, *_ = grid.holdings(0, 0, Kind.F, Kind.B, Kind.W)
    assert grid.capacity(0) < forward.bytes < 2**20
