"""GPipe and 1F1B: their formulas in the papers' unit model."""

from __future__ import annotations

import pytest
from support.units import ACTIVATION, units

from optpipe import InputError, certify, check
from optpipe_solver.systems import SYSTEMS, generate, parse


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 4, 8, 17])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1)])
def test_gpipe_and_1f1b_have_the_published_bubble_and_peaks(p, m, times):
    problem = units(p, m, times=times)
    flush, steady = (generate(name, problem) for name in ("gpipe", "1f1b"))
    for schedule in (flush, steady):
        assert check(problem, schedule) == []
        assert schedule.makespan_ms == (p - 1 + m) * sum(times)
        assert schedule.timeline.bubble == pytest.approx((p - 1) / (p - 1 + m))
    assert [peak.bytes for peak in certify(problem, flush).device] == [m * ACTIVATION] * p
    assert [peak.bytes for peak in certify(problem, steady).device] == [min(m, p - s) * ACTIVATION for s in range(p)]


def test_a_system_is_given_the_stages_it_needs_where_it_may_be():
    chunked = units(4, 8, v=2)
    with pytest.raises(InputError, match=r"^1f1b needs one stage a device, all in one row: the problem has other stages"):
        generate("1f1b", chunked)
    schedule = generate("1f1b", chunked, placements="all")
    assert str(schedule.placement) == "1 chunk a device"
    assert check(schedule.problem, schedule) == []


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("2f2b", r"method = '2f2b': the published schedules are gpipe, 1f1b"),
        ("1f1b:group=2", r"method = '1f1b:group=2': 1f1b has no parameter group \(its parameters: none\)"),
        ("1f1b:", r"method = '1f1b:': the published schedules are"),
    ],
)
def test_what_is_no_system_is_one_sentence(method, told):
    with pytest.raises(InputError, match=f"^{told}"):
        parse(method)


def test_each_system_says_where_it_comes_from():
    assert all(system.name == name and system.source for name, system in SYSTEMS.items())
