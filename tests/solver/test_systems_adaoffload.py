"""OptPipe's Algorithm 1 as printed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, unevenly, units

from optpipe import Kind, Op, certify, check
from optpipe_solver.systems import generate
from optpipe_solver.systems.adaoffload import fills


def offloading(p: int, m: int, ms: float, times: tuple[float, float, float] = (1, 1, 1)):
    return units(p, m, times=times, offload=(ms, ms, ACTIVATION))


@pytest.mark.parametrize(
    ("tolerance", "expected"),
    [
        # By hand, F = B = W = 1 and offloads of 0.5: EstStart(B_{s,0}) is 7, 6, 5, 4. A stage's forwards start every
        # 1.5, as each waits for the offload before it, and the m-th is refused when 1.5 m + 0.5 + s >= EstStart + T.
        (0, [5, 3, 2, 1]),
        (1, [5, 4, 3, 1]),
        (3, [7, 5, 4, 3]),
        (100, [9, 9, 9, 9]),
    ],
)
def test_steps_1_and_2_by_hand(tolerance: int, expected: list[int]) -> None:
    problem = offloading(4, 9, 0.5)
    assert fills(problem, tolerance) == expected
    schedule = generate(f"algorithm-1:tolerance={tolerance}", problem)
    for s, count in enumerate(expected):
        kinds = [op.kind for op in schedule.programs[s].ops() if op.kind in (Kind.F, Kind.B)]
        assert kinds.index(Kind.B) == count


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_it_runs_whatever_the_times_and_the_tolerance(data: st.DataObject) -> None:
    p, m, T = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 20))
    problem = unevenly(data.draw, offloading(p, m, data.draw(st.sampled_from([0.0, 0.5, 3.0]))))
    schedule = generate(f"algorithm-1:tolerance={T}", problem)
    assert check(problem, schedule) == []
    assert max(peak.bytes for peak in certify(problem, schedule).device) <= 4 * ACTIVATION
    timeline = schedule.timeline
    at = {timeline.rows.op(row): row for row in range(len(timeline.rows))}
    for s, count in enumerate(fills(problem, T)):
        for j, after in pairwise(range(count)):  # line 18
            offload = Op(Kind.O, s, j)
            if offload in at:
                assert timeline.start[at[Op(Kind.F, s, after)]] >= timeline.end[at[offload]] - 1e-9


def test_where_nothing_can_leave_it_is_1f1b_with_a_longer_warm_up() -> None:
    problem = units(4, 9)
    assert fills(problem, 0) == [7, 5, 3, 1]
    assert not [
        op for program in generate("algorithm-1", problem).programs for op in program.ops() if op.kind == Kind.O
    ]
