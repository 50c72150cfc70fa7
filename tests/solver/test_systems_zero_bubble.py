"""ZB-H1 and ZB-H2: their formulas in the paper's unit model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, units

from optpipe import certify, check
from optpipe_solver.systems import generate

GRADIENT = 300  # bytes that a weight gradient still needs


def bubbles(name, p, times):
    """Of makespan and span."""
    f, b, w = times
    if name == "zb-h1":
        return (p - 1) * max(f, b, f + b - w), (p - 1) * max(b, f + b - w)
    return (p - 1) * max(f, f + b - 2 * w, b - f), (p - 1) * max(0, f + b - 2 * w, b - f)


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 13])
def test_zb_h1_and_zb_h2_have_the_published_bubble_and_memory(name, k, p):
    """At F = B = W: (p-1)(F + B - W) and (p-1)(F + B - 2W) = 0, in the span; M and 2M."""
    full = k * (p - 1) + 1
    for m in (full, full + 1, 3 * p):
        problem = units(p, m)
        schedule = generate(name, problem)
        assert check(problem, schedule) == []
        assert schedule.span_ms == 3 * m + (p - 1) * (2 - k)
        assert schedule.makespan_ms == 3 * m + p - 1
        assert [peak.bytes for peak in certify(problem, schedule).device] == [full * ACTIVATION] * p


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
@given(p=st.integers(1, 7), more=st.integers(0, 5), times=st.tuples(*[st.integers(1, 9)] * 3))
@settings(max_examples=examples(60), deadline=None)
def test_zb_h1_and_zb_h2_for_other_times(name, k, p, more, times):
    m = k * (p - 1) + 1 + more
    problem = units(p, m, times=times, held=GRADIENT)
    schedule = generate(name, problem)
    makespan, span = bubbles(name, p, times)
    assert schedule.makespan_ms == m * sum(times) + makespan
    assert schedule.span_ms == m * sum(times) + span
    before_b = [k * (p - s - 1) + 1 for s in range(p)]
    held = [count * ACTIVATION + k * s * GRADIENT for s, count in enumerate(before_b)]
    assert [peak.bytes for peak in certify(problem, schedule).device] == held
