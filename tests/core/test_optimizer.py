"""Optimizers on the host: gradients out, update, parameters in; their streams, their order, and that activations do not
notice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import stages

from optpipe import DeadlockError, Kind, Op, Problem, Schedule, ScheduleError, ScheduleFile, certify, check, simulate
from optpipe.model.placement import together
from optpipe.show.lanes import blocks, kinds_in

STAGE = {
    "forward_ms": 2.0,
    "backward_input_ms": 2.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 10,
    "saved_for_weight_bytes": 4,
}
UPDATE = {"gradient_out_ms": 4.0, "update_ms": 6.0, "parameters_in_ms": 3.0}


def one_device(count: int = 2, m: int = 1, **changes: Any) -> Problem:
    """So many stages in a row on one device."""
    stage = {"device": 0, **STAGE, **UPDATE, "offload_ms": 5.0, "reload_ms": 5.0, "offload_bytes": 8}
    return Problem.from_dict(
        {"microbatches": m, "devices": [{"activation_budget_bytes": 100}], "stages": [stage] * count} | changes
    )


def starts(problem: Problem, *programs: str) -> dict[str, float]:
    schedule = Schedule.parse(problem, [program.split() for program in programs])
    assert check(problem, schedule) == []
    ops = [str(op) for program in schedule.programs for op in program.ops()]
    return dict(zip(ops, schedule.timeline.start.tolist(), strict=True))


def test_times_by_hand():
    at = starts(one_device(), "0P0 1P0 0F0 1F0 1BW0 1G0 1U0 0BW0 0G0 0U0")
    assert (at["0P0"], at["0F0"], at["1P0"], at["1F0"]) == (
        0.0,
        3.0,
        3.0,
        6.0,
    )  # the forward waits for the parameters, one link
    assert (at["1BW0"], at["1G0"], at["0BW0"]) == (8.0, 11.0, 11.0)  # gradients leave beside the next backward
    assert (at["1U0"], at["0G0"]) == (15.0, 15.0)
    assert at["0U0"] == 21.0  # its gradients are there at 19, the host is busy until 21
    schedule = Schedule.parse(one_device(), [["0P0", "1P0", "0F0", "1F0", "1BW0", "1G0", "1U0", "0BW0", "0G0", "0U0"]])
    assert schedule.makespan_ms == schedule.span_ms == 27.0
    assert schedule.timeline.busy_ms() == [10.0]


def test_parameters_of_a_later_stage_come_behind_a_forward():
    assert starts(one_device(), "0F0 1P0 1F0 1BW0 0BW0 1G0 1U0")["1F0"] == 5.0


@pytest.mark.parametrize(("mode", "parameters"), [("half_duplex", 7.0), ("full_duplex", 2.0)])
def test_they_share_the_host_link_with_offloads(mode, parameters):
    at = starts(one_device(transfer_mode=mode), "0F0 0O0 1P0 0D0 1F0 1BW0 1G0 0R0 0BW0 1U0")
    assert at["1P0"] == parameters  # after the offload, or beside it
    assert at["0R0"] == at["1G0"] + (4.0 if mode == "half_duplex" else 0.0)


def test_a_shared_link_orders_them_too():
    devices = [{"activation_budget_bytes": 100, "link": "pcie0"}] * 2
    problem = one_device(devices=devices, stages=[{"device": d, **STAGE, **UPDATE} for d in range(2)])
    programs = [["0P0", "0F0", "0BW0", "0G0", "0U0"], ["1P0", "1F0", "1BW0", "1G0", "1U0"]]
    schedule = Schedule.parse(problem, programs, {"pcie0": ["1P0", "0P0", "1G0", "0G0"]})
    assert check(problem, schedule) == []
    assert schedule.timeline.start[:2].tolist() == [3.0, 6.0]
    assert [op.kind for op in ScheduleFile.of(schedule).ops].count("U") == 2
    assert "4 transfers on it" in check(problem, Schedule.parse(problem, programs, {"pcie0": ["1P0"]}))[0]


def test_a_schedule_need_not_have_them_and_memory_is_the_same():
    problem = one_device(m=2)
    plain, more = "0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 0BW1", "0P0 1P0 0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 1G0 1U0 0BW1 0G0 0U0"
    without, beside = (Schedule.parse(problem, [program.split()]) for program in (plain, more))
    assert check(problem, without) == check(problem, beside) == []
    assert certify(problem, without).device == certify(problem, beside).device
    assert certify(problem, beside).host[0].bytes == 0
    assert beside.makespan_ms > without.makespan_ms


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("0F0 1F0 1BW0 0BW0 1G0 1U0", "1G0 and 1U0 without 1P0: an optimizer on the host is G, U and P"),
        ("1P0 0F0 1F0 1BW0 0BW0", "1P0 without 1G0 and 1U0: an optimizer on the host is G, U and P"),
        ("0F0 1F0 1P0 1BW0 0BW0 1G0 1U0", "1P0 stands after 1F0"),
        ("1P0 0F0 1F0 1G0 1BW0 0BW0 1U0", "1BW0 stands after 1G0"),
        ("1P0 0F0 1F0 1B0 1G0 1W0 0BW0 1U0", "1W0 stands after 1G0"),
        ("1P0 0F0 1F0 1BW0 1U0 0BW0 1G0", "1G0 stands after 1U0"),
        ("1P0 1P0 0F0 1F0 1BW0 1G0 0BW0 1U0", "1P0 stands 2 times"),
        ("2P0 0F0 1F0 1BW0 0BW0", "2P0 in the program of device 0: there are 2 stages"),
    ],
)
def test_what_is_wrong_is_said(program, message):
    problem = one_device()
    assert message in check(problem, Schedule.parse(problem, [program.split()]))


def test_what_simulate_cannot_time_is_refused():
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
    plain = one_device(stages=[{"device": 0, **STAGE}] * 2)
    with pytest.raises(ScheduleError, match="0P0 in the program of device 0: the stage has no update_ms"):
        simulate(plain, Schedule.parse(plain, [["0P0", "0F0"]]))
    with pytest.raises(DeadlockError) as caught:
        simulate(one_device(), Schedule.parse(one_device(), [["0F0", "0P0", "1F0", "1BW0", "0BW0", "0G0", "0U0"]]))
    assert caught.value.cycle == [Op(Kind.F, 0, 0), Op(Kind.P, 0, 0)]


def test_stages_of_another_route_have_them_with_micro_batch_0():
    """Micro-batch 0 does not pass stage 1; its optimizer's ops are written with that number all the same."""
    problem = one_device(m=2, routes=[[0], [1]], microbatch_routes=[0, 1])
    assert starts(problem, "1P0 0F0 0BW0 1F1 1BW1 1G0 1U0")["1U0"] == 14.0


def test_pictures_know_them():
    schedule = Schedule.parse(one_device(), [["0P0", "1P0", "0F0", "1F0", "1BW0", "1G0", "1U0", "0BW0", "0G0", "0U0"]])
    assert {Kind.G, Kind.U, Kind.P} <= set(kinds_in(schedule))
    assert sum(block.transfer for block in blocks(schedule)) == 6


@settings(deadline=None)
@given(st.lists(stages(0, updating=True), min_size=1, max_size=4), st.integers(1, 4))
def test_pieces_update_in_all_what_the_whole_did(costs, shares):
    piece = together(costs, shares)
    for name in UPDATE:
        whole = [getattr(stage, name) for stage in costs if stage.can_update]
        assert (name in piece) == bool(whole)
        assert shares * piece.get(name, 0.0) == pytest.approx(sum(whole))
