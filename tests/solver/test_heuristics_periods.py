"""A long schedule from a short one: where list scheduling becomes periodic, repeating its period is as good as going
on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from support.strategies import problems

from optpipe import Device, Problem, Stage, check
from optpipe_solver import plan
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.heuristics.list_scheduling import ListScheduler
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import schedule_by_policy
from optpipe_solver.lift import lift_table

OFFLOAD = {"offload_ms": 12.0, "reload_ms": 12.0, "offload_bytes": 5}


def pipeline(devices: int, microbatches: int, memory: int, jitter: float = 0.0) -> Problem:
    noise = np.random.default_rng(0)
    stages = [
        Stage(
            device=d,
            **{
                f"{name}_ms": ms * (1 + jitter * noise.random())
                for name, ms in (("forward", 10), ("backward_input", 10))
            },
            backward_weight_ms=8.0,
            activation_bytes=5,
            saved_for_weight_bytes=2,
            **OFFLOAD,
        )
        for d in range(devices)
    ]
    return Problem(
        microbatches=microbatches, p2p_ms=1.0, devices=[Device(activation_budget_bytes=memory)] * devices, stages=stages
    )


def run(problem: Problem, policy: Policy):
    listing = ListScheduler(problem, policy)
    assert listing.run()
    return np.array(listing.rows, dtype=np.int32), np.array(listing.starts)


@pytest.mark.parametrize("policy", [Policy(offload=(1.0,) * 6, patience=0.5), Policy(), Policy(split=False)])
@pytest.mark.parametrize("microbatches", [61, 120])
def test_a_repeated_period_is_as_good_as_list_scheduling_all_of_it(policy, microbatches):
    problem = pipeline(6, microbatches, 15)
    longer = lengthened(*run(problem.replace(microbatches=40), policy), microbatches)
    assert longer is not None
    schedule = lift_table(problem, *longer)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms <= 1.02 * lift_table(problem, *run(problem, policy)).makespan_ms


def test_without_a_period_nothing_is_repeated():
    assert lengthened(*run(pipeline(6, 6, 15), Policy()), 20) is None
    table = np.array([[0, 0, j, 0, 0] for j in range(12)], dtype=np.int32)
    assert lengthened(table, np.cumsum(np.arange(12.0)), 20) is None


def test_a_large_problem_is_listed_by_its_period(monkeypatch):
    problem = pipeline(6, 400, 15, jitter=0.05)
    policy = Policy(offload=(1.0,) * 6, patience=0.5, alike=True)
    whole = schedule_by_policy(problem, policy, "x")
    handled = []
    run_to_the_end = ListScheduler.run
    monkeypatch.setattr(plan, "REPEAT_FORWARDS", 1000)
    monkeypatch.setattr(
        ListScheduler,
        "run",
        lambda self, deadline: handled.append(self.problem.microbatches) or run_to_the_end(self, deadline),
    )
    quick = schedule_by_policy(problem, policy, "x")
    assert len(handled) == 1
    assert handled[0] < 50
    assert quick.makespan_ms <= 1.01 * whole.makespan_ms


@settings(max_examples=20, deadline=None)
@given(problems())
def test_a_stream_ends_at_its_deadline(problem):
    for name, stream in STREAMS.items():
        assert list(stream(problem, "makespan", deadline=0.0)) == [] or name == "naive"
