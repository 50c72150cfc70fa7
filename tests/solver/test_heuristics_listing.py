"""List scheduling: whatever the policy prefers, the schedule is whole and fits wherever any schedule does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline as make_pipeline
from support.problems import stage as problem_stage
from support.strategies import problems

from optpipe import Kind, Problem, certify, check
from optpipe_solver.bounds.least_memory import least_memory
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.heuristics.list_scheduling import ListScheduler
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.heuristics.policy import Policy

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
def policies(draw, problem):
    stages = problem.stages

    def shares(can):
        return tuple(draw(st.sampled_from([0.0, 0.5, 1.0])) if able else 0.0 for able in can)

    limits = st.sampled_from([1, 2, 3, 4, problem.microbatches])
    return Policy(
        in_flight=tuple(draw(limits) for _ in stages),
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
    policy = data.draw(policies(problem))
    assert check(problem, ListScheduler(problem).schedule(policy, "any")) == []


@settings(max_examples=examples(200), deadline=None)
@given(tight_problems())
def test_one_micro_batch_at_a_time_fits_wherever_any_schedule_does(problem):
    assert check(problem, one_at_a_time(problem, "naive")) == []


def pipeline(devices: int, microbatches: int, memory: int) -> Problem:
    return make_pipeline(devices, microbatches, memory, COSTS, p2p_ms=1.0)


def listed(problem: Problem, offload: float = 0.0, recompute: float = 0.0):
    """The schedule with as many micro-batches in flight as memory admits, and these shares of activations away."""
    n = len(problem.stages)
    policy = Policy((problem.microbatches,) * n, offload=(offload,) * n, recompute=(recompute,) * n)
    return ListScheduler(problem).schedule(policy, "x")


def test_what_leaves_is_back_when_its_backward_comes():
    problem = pipeline(4, 8, 15)
    schedule = listed(problem, offload=1.0)
    assert any(op.kind is Kind.O for op in schedule.programs[0].ops())
    late = [op for op in schedule.programs[3].ops() if op.kind is Kind.O]
    assert late == []  # its backwards come at once: nothing would be back in time
    assert schedule.makespan_ms <= listed(problem).makespan_ms - 28


def test_half_of_the_activations_leave_if_the_policy_says_so():
    problem = pipeline(6, 12, 10**6)
    half, whole = (
        sum(op.kind is Kind.O for op in listed(problem, offload=share).programs[0].ops()) for share in (0.5, 1.0)
    )
    assert 0 < half <= whole // 2 + 1


def test_a_weight_gradient_that_needs_more_than_the_activation_is_fused_where_memory_is_short():
    costs = COSTS | {"saved_for_weight_bytes": 8}
    short, ample = (make_pipeline(1, 2, size, costs) for size in (5, 16))
    assert listed(short).programs[0].texts() == ["0F0", "0BW0", "0F1", "0BW1"]
    assert any(op.kind is Kind.B for op in listed(ample).programs[0].ops())


def test_recompute_keeps_the_checkpoint_only():
    problem = make_pipeline(1, 4, 20, problem_stage((10, 10, 8), (5, 2), recompute=(10, 1)))
    schedule = listed(problem, recompute=1.0)
    assert sum(op.kind is Kind.C for op in schedule.programs[0].ops()) == 4
    assert certify(problem, schedule).fits


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_a_stream_ends_at_its_deadline(problem):
    for name, stream in STREAMS.items():
        assert list(stream(problem, "makespan", deadline=0.0)) == [] or name == "naive"
