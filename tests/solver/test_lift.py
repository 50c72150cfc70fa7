"""`lift`: any valid times become programs that run no later and hold no more."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems, problems_with_schedules

from optpipe import Device, Kind, Op, Pair, Problem, Schedule, Stage, certify, check
from optpipe.lift import grain, lift

STAGE = {
    "forward_ms": 10.0,
    "backward_input_ms": 10.0,
    "backward_weight_ms": 8.0,
    "activation_bytes": 5,
    "saved_for_weight_bytes": 2,
}
OFFLOAD = {"offload_ms": 12.0, "reload_ms": 12.0, "offload_bytes": 5}


def one_device(microbatches: int, **changes: object) -> Problem:
    return Problem(
        microbatches=microbatches,
        devices=[Device(activation_budget_bytes=AMPLE)],
        stages=[Stage(device=0, **STAGE, **OFFLOAD)],
        **changes,
    )


def times(schedule: Schedule) -> dict[Op, float]:
    ops = [op for program in schedule.programs for op in program.ops()]
    return {op: start for op, start in zip(ops, schedule.timeline.start.tolist(), strict=True) if op.kind is not Kind.D}


def lasting_pairs(problem: Problem, schedule: Schedule) -> bool:
    pairs = [item for program in schedule.programs for item in program if isinstance(item, Pair)]
    return all(problem.costs.ms[op.kind, op.stage, op.microbatch] > 0 for pair in pairs for op in pair)


@settings(max_examples=examples(300), deadline=None)
@given(problems_with_schedules(), st.integers(0, 2**32 - 1))
def test_a_simulated_schedule_lifted_again_runs_no_later_and_holds_no_more(pair, seed):
    problem, schedule = pair
    assume(lasting_pairs(problem, schedule))  # an op that takes no time is not told apart from one that runs alone
    noise = np.random.default_rng(seed).uniform(-1e-9, 1e-9, 10_000).tolist()
    again = lift(problem, {op: start + noise.pop() for op, start in times(schedule).items()}, "again")
    assert check(problem, again) == []
    assert again.makespan_ms <= schedule.makespan_ms + 1e-6
    assert again.method == "again"
    if all(
        ms > 0
        for ms in (*problem.costs.ms[[Kind.F, Kind.B, Kind.W]].ravel(), *problem.costs.levels.recompute_ms.ravel())
    ):  # else the order at one moment is lift's choice
        for held, before in zip(certify(problem, again).device, certify(problem, schedule).device, strict=True):
            assert held.bytes <= before.bytes


@settings(max_examples=examples(150), deadline=None)
@given(problems(), st.data())
def test_any_times_whatever_become_programs_without_deadlock(problem, data):
    starts: dict[Op, float] = {}
    for j in range(problem.microbatches):
        for s in problem.route(j):
            kinds = [Kind.F, Kind.B, Kind.W] + [Kind.O, Kind.R] * problem.stages[s].can_offload
            for kind in kinds:
                for part in range(problem.stages[s].offload_parts if kind in (Kind.O, Kind.R) else 1):
                    starts[Op(kind, s, j, part)] = data.draw(st.integers(0, 12)) / 2
    assume(problem.overlap_factor is None)
    assert check(problem, lift(problem, starts)) == []


def test_a_drop_stands_where_compute_does_not_wait_and_a_reload_where_it_starts():
    problem = one_device(2)
    starts = {"0F0": 0.0, "0O0": 10.0, "0F1": 10.0, "0R0": 42.0, "0B1": 22.0, "0W1": 32.0, "0BW0": 54.0}
    schedule = lift(problem, {Op.parse(text): start for text, start in starts.items()})
    assert schedule.programs[0].texts() == ["0F0", "0O0", "0F1", "0D0", "0B1", "0W1", "0R0", "0BW0"]
    assert schedule.makespan_ms == 70.0  # the times given left 2 ms lie idle


def test_a_reload_that_would_start_while_compute_spans_its_offloads_end_stands_behind_the_drop():
    problem = one_device(2)
    starts = {"0F0": 0.0, "0O0": 10.0, "0F1": 13.0, "0R0": 22.0, "0BW1": 23.0, "0BW0": 41.0}
    schedule = lift(problem, {Op.parse(text): start for text, start in starts.items()})
    assert schedule.programs[0].texts() == ["0F0", "0O0", "0F1", "0D0", "0R0", "0BW1", "0BW0"]
    assert check(problem, schedule) == []


def test_what_is_dropped_when_a_forward_without_length_runs_is_gone_before_it():
    costs = STAGE | OFFLOAD | {"forward_ms": 0.0, "offload_ms": 0.0}
    problem = Problem(microbatches=2, devices=[Device(activation_budget_bytes=5)], stages=[Stage(device=0, **costs)])
    starts = {"0F0": 0.0, "0O0": 1.0, "0F1": 1.0, "0BW1": 1.0, "0R0": 19.0, "0BW0": 31.0}
    schedule = lift(problem, {Op.parse(text): start for text, start in starts.items()})
    assert check(problem, schedule) == []


def test_a_pair_takes_the_factor_of_its_two_stages():
    factors = [[1.0, 0.5], [0.75, 1.0]]
    problem = pipeline(1, 2, 99, [stage((10, 10, 5), (1, 1), device=0)] * 2, overlap_factor=factors)
    starts = {"0F0": 0, "1F0": 10, "0F1": 20, "1BW0": 20, "1F1": 32.5, "0BW0": 32.5, "1BW1": 51.25, "0BW1": 66.25}
    schedule = lift(problem, {Op.parse(text): start for text, start in starts.items()})
    assert schedule.programs[0].texts() == ["0F0", "1F0", "0F1+1BW0", "1F1+0BW0", "1BW1", "0BW1"]
    assert list(schedule.timeline.start) == [0, 10, 20, 20, 32.5, 32.5, 51.25, 66.25]


@pytest.mark.parametrize("noise", [-1e-9, 0.0, 1e-9])
@pytest.mark.parametrize("grains", [0.0, 0.5])
def test_a_forward_and_a_backward_that_start_together_become_a_pair(grains, noise):
    problem = one_device(2, overlap_factor=0.75)
    moment = grain(np.array([33.0]))
    at = (np.ceil(10.0 / moment) + grains) * moment  # also between two grains, where rounding would part them
    starts = {"0F0": 0.0, "0F1": at + noise, "0B0": at - noise, "0W0": 25.0, "0BW1": 33.0}
    schedule = lift(problem, {Op.parse(text): start for text, start in starts.items()})
    assert schedule.programs[0].texts() == ["0F0", "0F1+0B0", "0W0", "0BW1"]
    assert schedule.makespan_ms == pytest.approx(51.0)
