"""List scheduling: whatever the policy prefers, the schedule is whole and fits wherever any schedule does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline as make_pipeline
from support.problems import stage as problem_stage
from support.strategies import problems

from optpipe import Kind, Problem, certify, check
from optpipe_solver import plan
from optpipe_solver.bounds.least_memory import least_memory
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import PolicySchedules

COSTS = problem_stage((10, 10, 8), (5, 2), offload=(12, 12, 5))


@st.composite
def tight_problems(draw):
    """Any problem, with hardly more memory than the least."""
    problem = draw(problems(max_stages=5, max_microbatches=5))
    content = problem.to_dict()
    for device in content["devices"]:
        host = draw(st.sampled_from([None, 0, 5, 25, 60]))
        device |= {} if host is None else {"host_memory_bytes": host}
    for device, needed in zip(content["devices"], least_memory(Problem.from_dict(content)), strict=True):
        device["activation_budget_bytes"] = needed + draw(st.sampled_from([0, 0, 1, 5, 20]))
    return Problem.from_dict(content)


@st.composite
def policies(draw, stages):
    def shares(can):
        return tuple(draw(st.sampled_from([0.0, 0.5, 1.0])) if able else 0.0 for able in can)

    limits = st.lists(st.integers(1, 4), min_size=len(stages), max_size=len(stages)).map(tuple)
    return Policy(
        in_flight=draw(st.none() | limits),
        split=draw(st.booleans()),
        offload=shares([stage.can_offload for stage in stages]),
        recompute=shares([stage.can_recompute for stage in stages]),
        patience=draw(st.sampled_from([0.0, 0.5, 2.0])),
        eager=draw(st.sampled_from([1.0, 2.0])),
    )


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_every_policy_ends_with_a_whole_schedule_that_fits(data):
    problem = data.draw(tight_problems())
    policy = data.draw(policies(problem.stages))
    assert check(problem, PolicySchedules(problem, "any").schedule(policy)) == []


@settings(max_examples=examples(100), deadline=None)
@given(tight_problems())
def test_a_large_problem_has_its_schedule_with_a_period_or_without(problem):
    large = problem if problem.routes else problem.model_copy(update={"microbatches": 37})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "REPEAT_FORWARDS", 0)
        for policy in (Policy(alike=True), Policy(offload=tuple(float(stage.can_offload) for stage in problem.stages))):
            schedule = PolicySchedules(large, "any").schedule(policy)
            assert schedule is not None
            assert schedule.problem == large
            assert check(large, schedule) == []


@settings(max_examples=examples(200), deadline=None)
@given(tight_problems())
def test_one_micro_batch_at_a_time_fits_wherever_any_schedule_does(problem):
    assert check(problem, one_at_a_time(problem, "naive")) == []


def pipeline(devices: int, microbatches: int, memory: int) -> Problem:
    return make_pipeline(devices, microbatches, memory, COSTS, p2p_ms=1.0)


def test_what_leaves_is_back_when_its_backward_comes():
    problem = pipeline(4, 8, 15)
    schedule = PolicySchedules(problem, "x").schedule(Policy(offload=(1.0,) * 4))
    assert any(op.kind is Kind.O for op in schedule.programs[0].ops())
    late = [op for op in schedule.programs[3].ops() if op.kind is Kind.O]
    assert late == []  # its backwards come at once: nothing would be back in time
    assert schedule.makespan_ms <= PolicySchedules(problem, "x").schedule(Policy()).makespan_ms - 28


def test_half_of_the_activations_leave_if_the_policy_says_so():
    problem = pipeline(6, 12, 10**6)
    half, all_of_them = (PolicySchedules(problem, "x").schedule(Policy(offload=(share,) * 6)) for share in (0.5, 1.0))
    leaves = [sum(op.kind is Kind.O for op in schedule.programs[0].ops()) for schedule in (half, all_of_them)]
    assert 0 < leaves[0] <= leaves[1] // 2 + 1


def test_a_weight_gradient_that_needs_more_than_the_activation_is_fused_where_memory_is_short():
    costs = COSTS | {"saved_for_weight_bytes": 8}
    short, ample = (make_pipeline(1, 2, size, costs) for size in (5, 16))
    assert PolicySchedules(short, "x").schedule(Policy()).programs[0].texts() == ["0F0", "0BW0", "0F1", "0BW1"]
    assert any(op.kind is Kind.B for op in PolicySchedules(ample, "x").schedule(Policy()).programs[0].ops())


def test_recompute_keeps_the_checkpoint_only():
    problem = make_pipeline(1, 4, 20, problem_stage((10, 10, 8), (5, 2), recompute=(10, 1)))
    schedule = PolicySchedules(problem, "x").schedule(Policy(recompute=(1.0,)))
    assert sum(op.kind is Kind.C for op in schedule.programs[0].ops()) == 4
    assert certify(problem, schedule).fits
