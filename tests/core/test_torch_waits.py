"""Rows for torch 2.15: one wait for every send and every reduction, at a place where nothing waits in a circle."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems, strategies
from support.examples import examples

from optpipe import Schedule, export_schedule, leave_out_offload

COMPUTE = re.compile(r"(\d+)([FIB])(\d+)")


def test_a_send_is_waited_for_behind_the_op_that_consumes_it() -> None:
    two = problems.pipeline(2, 2, 100, problems.stage((1, 1, 1)))
    one_f_one_b = Schedule.parse(two, [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    assert export_schedule(one_f_one_b, "torch-comms-waits") == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0WAIT_SEND_F1,0RECV_B1,0B1,"
        "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1WAIT_SEND_B0,1SEND_B1,"
        "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B1\n"
    )


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_waits_end_and_stand_once_behind_their_sends(data: st.DataObject) -> None:
    """Ranks that send and receive at once, and stop at a wait until the other rank has posted the receive."""
    problem = data.draw(strategies.looped()).replace(overlap_factor=0.75)
    drawn = leave_out_offload(data.draw(strategies.schedules(problem)))
    rows = [line.split(",") for line in export_schedule(drawn, "torch-comms-waits").splitlines()]
    without = [[action for action in row if "WAIT" not in action] for row in rows]
    assert "".join(",".join(row) + "\n" for row in without) == export_schedule(drawn, "torch-comms")

    devices = [stage.device for stage in problem.stages]
    posted: set[str] = set()
    at, moved = [0] * len(rows), True
    while moved:
        moved = False
        for d, row in enumerate(rows):
            while at[d] < len(row) and needs(row[at[d]], devices) <= posted:
                assert row[at[d]] not in posted
                posted.add(row[at[d]])
                posted |= {"".join(op) for op in COMPUTE.findall(row[at[d]])}
                at[d], moved = at[d] + 1, True
    assert at == [len(row) for row in rows]
    sends = {action for action in posted if "SEND" in action and "WAIT" not in action}
    assert {action.replace("WAIT_", "") for action in posted if "WAIT_SEND" in action} == sends


def needs(action: str, devices: list[int]) -> set[str]:
    """What must have been issued before an action goes on."""
    if found := re.fullmatch(r"(\d+)WAIT_SEND_([FB])(\d+)", action):
        s, letter, j = found.groups()
        return {f"{s}SEND_{letter}{j}", f"{int(s) + (1 if letter == 'F' else -1)}RECV_{letter}{j}"}
    if "WAIT" in action:
        return {action.replace("WAIT_", "")}
    arrivals = set()
    for stage, letter, j in COMPUTE.findall(action) if "SEND" not in action and "RECV" not in action else ():
        s, way = int(stage), "F" if letter == "F" else "B"
        other = s - 1 if way == "F" else s + 1
        if 0 <= other < len(devices) and devices[other] != devices[s]:
            arrivals |= {f"{s}RECV_{way}{j}", f"{other}SEND_{way}{j}"}
    return arrivals
