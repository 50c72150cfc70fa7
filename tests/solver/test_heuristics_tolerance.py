"""AdaOffload's tolerance: Algorithm 1's count of forwards, and what it makes of a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.strategies import problems
from support.units import units

from optpipe import Kind, Problem, check
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import PolicySchedules
from optpipe_solver.heuristics.tolerance import tolerated_forwards


def algorithm_1(problem: Problem, tolerance_ms: float) -> list[int]:
    """Steps 1 and 2 as printed, without their waiting for offloads; one stage a device."""
    stages, hop = problem.stages, problem.p2p_ms
    forwards = [[0.0] * problem.microbatches for _ in stages]
    for s, stage in enumerate(stages):
        for j in range(problem.microbatches):
            arrived = forwards[s - 1][j] + hop if s else 0.0
            forwards[s][j] = max(arrived, forwards[s][j - 1] if j else 0.0) + stage.forward_ms
    counts = []
    for s in range(len(stages)):
        est_start = forwards[-1][0] + sum(stage.backward_input_ms + hop for stage in stages[s + 1 :])
        counts.append(1 + sum(ended < est_start + tolerance_ms - 1e-9 for ended in forwards[s][:-1]))
    return counts


@pytest.mark.parametrize("tolerance_ms", [0.0, 0.5, 2.0, 7.0])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (3, 4, 2)])
def test_it_counts_as_algorithm_1_does(times, tolerance_ms):
    for p, p2p_ms in ((1, 0.0), (4, 0.0), (5, 0.75)):
        problem = units(p, 12, times=times).replace(p2p_ms=p2p_ms)
        uneven = [
            stage.model_copy(update={"forward_ms": stage.forward_ms * (1 + s % 3)})
            for s, stage in enumerate(problem.stages)
        ]
        for each in (problem, problem.replace(stages=uneven)):
            assert list(tolerated_forwards(each, tolerance_ms)) == algorithm_1(each, tolerance_ms)


def test_in_the_unit_model_a_stage_fills_its_wait_and_a_tolerance_adds_to_it():
    problem = units(4, 16)
    assert tolerated_forwards(problem, 0.0) == (7, 5, 3, 1)  # 2(p - s) - 1: as ZB-H2's warm-up
    assert tolerated_forwards(problem, 3.0) == (10, 8, 6, 4)


@pytest.mark.parametrize("tolerance_ms", [0.0, 1.0, 3.0])
def test_forwards_delay_the_first_backward_by_no_more_than_the_tolerance(tolerance_ms):
    problem = units(4, 16)
    most = tolerated_forwards(problem, tolerance_ms)
    schedule = PolicySchedules(problem, "adaoffload").schedule(Policy(before=most, in_flight=most))
    assert schedule is not None
    assert check(problem, schedule) == []
    for s, program in enumerate(schedule.programs):
        kinds = [op.kind for op in program]
        assert kinds.index(Kind.B) == most[s]
    timeline = schedule.timeline
    backward = (timeline.table[:, 0] == Kind.B) & (timeline.table[:, 1] == 3) & (timeline.table[:, 2] == 0)
    assert timeline.start[backward] == [4 + tolerance_ms]  # EstStart and T, on the last stage


@settings(max_examples=examples(40), deadline=None)
@given(problems(), st.sampled_from([0.0, 1.0, 5.0]))
def test_any_problem_has_a_schedule_with_a_tolerance(problem, tolerance_ms):
    most = tolerated_forwards(problem, tolerance_ms)
    assert all(1 <= n <= problem.microbatches for n in most)
    assert all(a <= b for a, b in zip(most, tolerated_forwards(problem, tolerance_ms + 1.0), strict=True))
    schedule = PolicySchedules(problem, "adaoffload").schedule(Policy(before=most))
    assert schedule is not None
    assert check(problem, schedule) == []
