"""What passes between stages for a shape follows from learned shapes, or is learned: it is never guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from optpipe_runtime.stage.io import Dimensions, LearnedRoutes, RouteSpecs, Shape, Spec, StageIO, extremes_first

WIDTH = 8


def passing(sizes: Dimensions, lengths: Callable[[int], int] = lambda length: length) -> RouteSpecs:
    """Of one stage whose output has rows, another length and a width; its loss is a number."""
    rows, length = sizes[:2]
    given = Spec((rows, length), torch.int64, False)
    out = Spec((rows, lengths(length), WIDTH), torch.float32, True)
    reached = (frozenset[int](),)
    return (
        StageIO((given,), begins=True, ends=False, outputs=(out,), reached=reached, needed=(0,)),
        StageIO((out,), begins=False, ends=True, outputs=(Spec((), torch.float32, True),), reached=(frozenset({0}),)),
    )


def learned(*all_sizes: Dimensions, lengths: Callable[[int], int] = lambda length: length) -> LearnedRoutes:
    passings = LearnedRoutes()
    for sizes in all_sizes:
        passings.add(sizes, passing(sizes, lengths))
    return passings


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=12), st.integers(1, 3))
def test_what_is_derived_is_what_would_be_learned(shapes: list[Dimensions], factor: int) -> None:
    """Inputs and targets have the same sizes; the output is so many times as long."""
    passings = LearnedRoutes()
    for _, sizes in extremes_first([Shape(None, (*sizes, *sizes)) for sizes in shapes]):
        expected = passing(sizes, lambda length: factor * length)
        found = passings.find(sizes)
        if found is None:
            passings.add(sizes, expected)
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        (lambda length: length, (1, 20, 1, 20)),  # longer than all
        (lambda length: -(-length // 4), (1, 6, 1, 6)),  # in proportion no whole number
        (lambda length: min(length, 10), (1, 9, 1, 9)),  # neither stays nor grows in proportion
        (lambda length: length, (1, 6, 1, 5)),  # by inputs or by targets: not known
    ],
)
def test_other_shapes_are_learned(lengths: Callable[[int], int], new: Dimensions) -> None:
    assert learned((1, 4, 1, 4), (1, 16, 1, 16), lengths=lengths).find(new) is None


def test_between_learned_shapes_nothing_is_learned() -> None:
    assert learned((1, 4, 1, 4), (1, 16, 1, 16)).find((1, 7, 1, 7)) == passing((1, 7))
