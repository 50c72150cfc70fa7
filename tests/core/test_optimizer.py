"""Optimizers on the host: the times and the order of gradients out, update and parameters in.

They do not change the memory of activations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import GROUPS, pipeline, stage
from support.problems.strategies import stages

from optpipe import DeadlockError, Kind, Op, Problem, Schedule, ScheduleError, ScheduleFile, check, simulate
from optpipe.model.placement import together

TIMES = (2, 2, 1)
UPDATE = {"update": (4, 6, 3)}


def one_device(count: int = 2, m: int = 1, **fields: Any) -> Problem:
    """So many stages in a row on one device."""
    return pipeline(1, m, 100, [stage(TIMES, device=0, **UPDATE, offload=(5, 5, 8))] * count, **fields)


def starts(problem: Problem, *programs: str) -> dict[str, float]:
    schedule = Schedule.parse(problem, [program.split() for program in programs])
    assert check(problem, schedule) == []
    ops = [str(op) for program in schedule.programs for op in program.ops()]
    return dict(zip(ops, schedule.timeline.start.tolist(), strict=True))


def test_a_shared_link_orders_their_transfers_too():
    problem = pipeline(2, 1, 100, stage(TIMES, **UPDATE), device={"link": "pcie0"})
    programs = [["0P0", "0F0", "0BW0", "0G0", "0U0"], ["1P0", "1F0", "1BW0", "1G0", "1U0"]]
    schedule = Schedule.parse(problem, programs, {"pcie0": ["1P0", "0P0", "1G0", "0G0"]})
    assert check(problem, schedule) == []
    assert schedule.timeline.start[:2].tolist() == [3.0, 6.0]
    assert [op.kind for op in ScheduleFile.from_schedule(schedule).ops].count("U") == 2
    assert "4 transfers on it" in check(problem, Schedule.parse(problem, programs, {"pcie0": ["1P0"]}))[0]


def test_parameters_of_a_later_stage_come_in_during_a_forward():
    assert starts(one_device(), "0F0 1P0 1F0 1BW0 0BW0 1G0 1U0")["1F0"] == 5.0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("0F0 1F0 1BW0 0BW0 1G0 1U0", "1U0 has no 1P0: an optimizer on the host is G, U and P"),
        ("1P0 0F0 1F0 1BW0 0BW0", "1P0 has no 1U0: an optimizer on the host is G, U and P"),
        ("0F0 1F0 1P0 1BW0 0BW0 1G0 1U0", "1P0 stands after 1F0"),
        ("1P0 0F0 1F0 1G0 1BW0 0BW0 1U0", "1BW0 stands after 1G0"),
        ("1P0 0F0 1F0 1B0 1G0 1W0 0BW0 1U0", "1W0 stands after 1G0"),
        ("1P0 0F0 1F0 1BW0 1U0 0BW0 1G0", "1G0 stands after 1U0"),
        ("1P0 1P0 0F0 1F0 1BW0 1G0 0BW0 1U0", "1P0 stands 2 times"),
        ("2P0 0F0 1F0 1BW0 0BW0", "2P0 in the program of device 0: there are 2 stages"),
    ],
)
def test_each_mistake_is_reported(program, message):
    problem = one_device()
    assert message in check(problem, Schedule.parse(problem, [program.split()]))


def test_simulate_refuses_what_it_cannot_time():
    for program, m, message in (
        ("0F0 1F0 1BW0 0BW0 1U0", 1, "1U0 in the program of device 0 has no gradients"),
        ("0F0 1F0 1G0", 1, "1G0 in the program of device 0 has no weight gradient"),
        (
            "0P1 0F0 1F0",
            2,
            "0P1 in the program of device 0: what happens once an iteration is written with micro-batch 0",
        ),
    ):
        problem = one_device(m=m)
        with pytest.raises(ScheduleError, match=message):
            simulate(problem, Schedule.parse(problem, [program.split()]))
    plain = pipeline(1, 1, 100, stage(TIMES))
    with pytest.raises(ScheduleError, match="0P0 in the program of device 0: the stage has no update_ms"):
        simulate(plain, Schedule.parse(plain, [["0P0", "0F0"]]))
    with pytest.raises(DeadlockError) as caught:
        simulate(one_device(), Schedule.parse(one_device(), [["0F0", "0P0", "1F0", "1BW0", "0BW0", "0G0", "0U0"]]))
    assert caught.value.cycle == [Op(Kind.F, 0, 0), Op(Kind.P, 0, 0)]


def test_optimizer_ops_of_every_route_have_micro_batch_0():
    """Micro-batch 0 does not pass stage 1; its optimizer's ops are written with that number all the same."""
    problem = one_device(m=2, routes=[[0], [1]], microbatch_routes=[0, 1])
    assert starts(problem, "1P0 0F0 0BW0 1F1 1BW1 1G0 1U0")["1U0"] == 14.0


@settings(deadline=None)
@given(st.lists(stages(0, updating=True), min_size=1, max_size=4), st.integers(1, 4))
def test_the_pieces_of_a_stage_update_as_much_as_the_whole(costs, shares):
    piece = together(costs, shares)
    for name in GROUPS["update"]:
        whole = [getattr(stage, name) for stage in costs if stage.can_update]
        assert (name in piece) == bool(whole)
        assert shares * piece.get(name, 0.0) == pytest.approx(sum(whole))
