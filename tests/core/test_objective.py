"""Lengths, and the tolerance for rounding."""

from __future__ import annotations

import pytest
from support.problems.chain import chain, gpipe

from optpipe.evaluate.objective import NO_SCHEDULE_MS, TOLERANCE, gap, length_ms, raises, reaches, shorter


def test_a_length_is_the_makespan_or_the_span():
    schedule = gpipe(chain())
    assert length_ms(schedule, "makespan") == schedule.makespan_ms
    assert length_ms(schedule, "span") == schedule.span_ms
    assert length_ms(None, "makespan") == NO_SCHEDULE_MS


@pytest.mark.parametrize("length", [0.0, 1e-3, 100.0, 1e12])
def test_rounding_neither_improves_nor_proves_anything(length: float):
    nearly = length * (1 - TOLERANCE / 2)
    assert not shorter(nearly, length)
    assert not shorter(length, length)
    assert reaches(length, nearly)
    assert not raises(length, nearly)
    assert gap(length, nearly) == 0


def test_differences_beyond_rounding_count():
    assert shorter(99.0, 100.0)
    assert shorter(100.0, NO_SCHEDULE_MS)
    assert raises(100.0, 99.0)
    assert raises(0.0, float("-inf"))
    assert not reaches(100.0, 99.0)
    assert gap(100.0, 99.0) == pytest.approx(0.01)
    assert gap(None, 99.0) is None
    assert gap(100.0, None) is None
