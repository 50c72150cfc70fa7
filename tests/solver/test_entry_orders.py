"""Micro-batches that differ may enter in any order: published schedules and list scheduling are tried in several."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import pipeline, stage
from support.problems.strategies import problems_with_schedules
from support.problems.units import ACTIVATION, peaks

from optpipe import Problem, Schedule, check
from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.systems import SYSTEMS, generate, in_best_order, in_entry_orders

LENGTHS = (1.0, 5.0, 2.0, 4.0, 3.0, 1.0, 2.0, 6.0)


def packed(memory: int = 60, **fields: Any) -> Problem:
    """Four devices, eight micro-batches of different weights, each of which may enter at any time."""
    whole, half, quarter = (tuple(int(share * length) for length in LENGTHS) for share in (4, 2, 1))
    lists: dict[str, Any] = {
        **dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms"), LENGTHS),
        **dict.fromkeys(("activation_bytes", "offload_bytes"), whole),
        "saved_for_weight_bytes": half,
        "checkpoint_bytes": quarter,
    }
    return pipeline(4, 8, memory, stage(recompute=(1, 2)) | lists, **fields)


def entries(schedule: Schedule) -> list[int]:
    """The micro-batches in the order in which they enter."""
    return [op.microbatch for op in schedule.programs[0].ops() if op.kind is Kind.F and op.stage == 0]


@given(problems_with_schedules(beyond=True), st.data())
def test_a_renumbered_schedule_takes_the_same_time_and_memory(pair: tuple[Problem, Schedule], data: Any) -> None:
    problem, schedule = pair
    order = np.array(data.draw(st.permutations(range(problem.microbatches))))
    there = schedule.renumbered(problem.entering(np.argsort(order).tolist()), order)
    assert there.makespan_ms == pytest.approx(schedule.makespan_ms)
    assert peaks(there) == peaks(schedule)
    back = there.renumbered(there.problem.entering(order.tolist()), np.argsort(order))
    assert back.problem == problem
    assert back == schedule


@pytest.mark.parametrize("method", SYSTEMS)
def test_every_published_schedule_is_valid_in_every_order(method: str) -> None:
    problem = packed(memory=1000)
    try:
        schedules = list(in_entry_orders(method, problem, "all"))
    except InputError:  # it needs what this problem has not
        return
    assert schedules[0] == generate(method, problem, "all")
    assert len({tuple(entries(schedule)) for schedule in schedules}) == 5
    for schedule in schedules:
        assert check(schedule.problem, schedule) == []
    assert in_best_order(method, problem, "all").makespan_ms <= max(schedule.makespan_ms for schedule in schedules)


def test_the_best_order_of_1f1b_is_better_than_the_given_one() -> None:
    problem = packed()
    assert in_best_order("1f1b", problem).makespan_ms < generate("1f1b", problem).makespan_ms


def test_one_that_fits_is_preferred() -> None:
    """The heaviest micro-batches together, as in some orders, are too much."""
    most = {max(peaks(each)) for each in in_entry_orders("1f1b", packed())}
    assert len(most) > 1
    problem = packed(memory=round(min(most) * ACTIVATION))
    assert check(problem, in_best_order("1f1b", problem)) == []


@pytest.mark.parametrize("fixed", [False, True])
def test_list_scheduling_tries_orders_unless_the_order_is_fixed(fixed: bool) -> None:
    problem = packed(fixed_order=fixed)
    schedules = list(islice(STREAMS["adaoffload"](problem, "makespan"), 60))
    assert all(check(problem, schedule) == [] for schedule in schedules)
    assert (len({tuple(entries(schedule)) for schedule in schedules}) == 1) == fixed


def test_a_fixed_order_is_kept_by_every_published_schedule() -> None:
    assert [entries(each) for each in in_entry_orders("1f1b", packed(fixed_order=True))] == [list(range(8))]
