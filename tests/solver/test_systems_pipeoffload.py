"""PipeOffload: GIS and GIS-H by their formulas, PO-H and PO-F by theirs and with every sort of link."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.units import ACTIVATION, units

from optpipe import InputError, certify, check
from optpipe_solver.systems import generate


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (4, 6, 3), (1, 1, 0)])
def test_gis_has_the_published_peaks_and_bubble_for_every_group(d, v, times):
    f, b, w = times
    for g, rounds in product(range(ceil(d / 2), d + 1), (1, 3)):
        m = rounds * g
        problem = units(d, m, v=v, times=times)
        schedule = generate(f"gis:group={g}", problem)
        assert check(problem, schedule) == []
        assert certify(problem, schedule).device[0].bytes == max(peak.bytes for peak in certify(problem, schedule).device)
        assert certify(problem, schedule).device[0].bytes == min(m * v, g * (v - 1) + d) * ACTIVATION
        if d * max(f, b) <= g * (f + b + w):  # a forward, and a backward, passes all devices while a group takes its turn
            extra = (v - 1) * ((d - g) * f + max(0, d * b - g * (b + w)))
            assert schedule.makespan_ms == m * v * (f + b + w) + (d - 1) * (f + b) + extra


@pytest.mark.parametrize("held", [ACTIVATION, 0])  # activations that count until W, and until B
@pytest.mark.parametrize(("d", "v"), [(2, 2), (4, 1), (4, 3), (6, 4), (8, 2)])
def test_gis_and_gis_h_are_those_of_table_1(d, v, held):
    m, (f, b, w) = 2 * d, (2, 3, 1)
    gis, gis_h = (generate(name, units(d, m, v=v, times=(f, b, w), held=held)) for name in ("gis", "gis-h"))
    work = m * v * (f + b + w)
    assert gis.makespan_ms - work == (d - 1) * (f + b)
    assert gis_h.makespan_ms - work == (d - 1) * (f + b) + (v - 1) * d / 2 * (f + b - w)
    assert certify(gis.problem, gis).device[0].bytes == d * v * ACTIVATION  # M
    assert certify(gis_h.problem, gis_h).device[0].bytes == (d / 2 * (v - 1) + d) * ACTIVATION  # (v + 1) / 2v of it


def test_gis_begins_with_the_published_number_of_forwards():
    d, v, m = 4, 3, 8
    for i, program in enumerate(generate("gis", units(d, m, v=v)).programs):
        texts = program.texts()
        assert next(n for n, text in enumerate(texts) if "B" in text) == d * (v - 1) + d - i
        assert texts[:5] == [f"{i}F0", f"{i}F1", f"{i}F2", f"{i}F3", f"{d + i}F0"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_last_group_may_be_smaller(data):
    d, v, m = (data.draw(st.integers(1, most)) for most in (9, 4, 20))
    g = data.draw(st.integers(ceil(d / 2), d))
    problem = units(d, m, v=v, times=data.draw(st.sampled_from([(1, 1, 1), (3, 1, 2), (1, 4, 0)])))
    schedule = generate(f"gis-h:group={g}", problem)
    assert check(problem, schedule) == []
    assert certify(problem, schedule).device[0].bytes <= (g * (v - 1) + d) * ACTIVATION


@pytest.mark.parametrize(("method", "group"), [("gis", 2), ("gis-h", 2), ("gis", 6), ("gis-h", 0)])
def test_a_group_that_the_paper_excludes_is_one_sentence(method, group):
    with pytest.raises(InputError, match=rf"^group = {group}: {method} on 5 devices takes 3 to 5$"):
        generate(f"{method}:group={group}", units(5, 8, v=2))
