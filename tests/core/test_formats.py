"""Schedules in other programs' forms: what is written, what is read back, what is refused. As tables for Primus'
launcher what is expected was written by hand, in the form of its sources."""

import json
import re
from collections import deque
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.imports import imported
from support.problems import parsed, strategies
from support.problems.units import units

from optpipe import (
    InputError,
    Problem,
    ScheduleError,
    certify,
    check,
    export_schedule,
    leave_out_offload,
)
from optpipe.formats import export
from optpipe_solver.systems import generate

TWO = problems.pipeline(2, 2, 100, problems.stage(offload=(1, 1, 9)), overlap_factor=0.8)
COMPUTE = re.compile(r"(\d+)([FIB])(\d+)")


SPLIT = parsed(TWO, "0F0 0F1 0B0 0W0 0BW1", "1F0 1B0 1F1 1B1 1W0 1W1")
OFFLOADED = parsed(TWO, "0F0 0O0 0D0 0F1 0BW1 0R0 0BW0", "1F0 1F1 1BW1 1BW0")


def test_messages_stand_behind_the_op_that_sends_them() -> None:
    assert export_schedule(SPLIT, "torch-comms") == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1RECV_F1,1F0,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD\n"
    )


def test_a_pair_and_neighbours_on_one_device() -> None:
    v = problems.pipeline(2, 2, 100, [problems.stage(device=d) for d in (0, 1, 1, 0)], overlap_factor=0.8)
    paired = parsed(v, "0F0 0F1 3F0 3BW0 3F1 3BW1 0BW0 0BW1", "1F0 2F0 1F1 2F1+2BW0 1BW0 2BW1 1BW1")
    rows = export_schedule(paired, "torch-comms").splitlines()
    assert "(2F1;2B0)OVERLAP_F_B,2SEND_F1,1B0,1SEND_B0" in rows[1]
    assert not re.search("1SEND_F|2RECV_F|2SEND_B|1RECV_B", rows[1])


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_rows_run_where_every_message_waits_for_its_other_end(data: st.DataObject) -> None:
    """The strictest hardware: a send ends only while its receive is the other rank's next action, and the other way
    round. All ops of the schedule run, and the rows are read back as the same programs. That each stands behind what it
    needs the next test asks of the same rows with waits."""
    problem = data.draw(strategies.looped()).replace(overlap_factor=0.75)
    drawn = leave_out_offload(data.draw(strategies.schedules(problem)))
    text = export_schedule(drawn, "torch-comms")
    rows = [deque(line.split(",")) for line in text.splitlines()]
    while any(rows):
        moved = False
        for row in rows:
            while row and "SEND" not in row[0] and "RECV" not in row[0]:
                row.popleft()
                moved = True
            if row and (met := other_end(row[0], problem)) and rows[met[0]] and rows[met[0]][0] == met[1]:
                rows[met[0]].popleft()
                row.popleft()
                moved = True
        assert moved, f"{[list(row)[:3] for row in rows]} wait for each other"
    read = imported(text, problem)
    assert export_schedule(read, "torch-comms") == text
    assert imported(export_schedule(drawn, "torch-csv"), problem).programs == read.programs


def other_end(action: str, problem: Problem) -> tuple[int, str] | None:
    """Of a send: the rank that receives, and its action."""
    if not (found := re.fullmatch(r"(\d+)SEND_([FB])(\d+)", action)):
        return None
    s, letter, j = int(found[1]), found[2], found[3]
    to = s + 1 if letter == "F" else s - 1
    return problem.stages[to].device, f"{to}RECV_{letter}{j}"


def test_a_send_is_waited_for_behind_the_op_that_consumes_it() -> None:
    two = problems.pipeline(2, 2, 100, problems.stage((1, 1, 1)))
    one_f_one_b = parsed(two, "0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1")
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


def test_what_the_rows_cannot_say_is_refused_with_the_op() -> None:
    recomputing = problems.pipeline(1, 1, 100, problems.stage(recompute=(1, 1)))
    with pytest.raises(InputError, match=r"^0C0 in the program of device 0: .* no action for C$"):
        export_schedule(parsed(recomputing, "0F0 0C0 0BW0"), "torch-comms", without_offload=True)
    two_ways = problems.pipeline(2, 2, 100, problems.stage(), routes=[[0, 1], [1, 0]], microbatch_routes=[0, 1])
    idle = problems.pipeline(2, 1, 100, [problems.stage(device=1)])
    for schedule, to, message in (
        (OFFLOADED, "torch-csv", r"^0O0 in the program of device 0: .* no action for O; --without-offload"),
        (parsed(two_ways, "", ""), "torch-csv", r"^routes: one is \[1, 0\]"),
        (parsed(idle, "", "0F0 0BW0"), "torch-csv", "^device 0 has no stage"),
        (parsed(TWO, "0F0 0F1 0BW0", "1F0 1F1 1BW0 1BW1"), "torch-csv", "stage 0, micro-batch 1 has no backward"),
        (SPLIT, "torch_csv", r"^to = 'torch_csv': one of torch-csv, torch-comms, .* is expected; did"),
    ):
        with pytest.raises((InputError, ScheduleError), match=message):
            export_schedule(schedule, to)


def test_only_equal_micro_batches_change_names_for_the_losses_of_torch() -> None:
    swapped = "0F1 0F0 0F2 0BW1 0BW0 0BW2"
    alike = problems.pipeline(1, 3, 100, problems.stage() | {"forward_ms": [1.0, 1.0, 2.0]})
    assert export_schedule(parsed(alike, swapped), "torch-csv").strip() == "0F0,0F1,0F2,0B0,0B1,0B2"
    differing = problems.pipeline(1, 3, 100, problems.stage() | {"activation_bytes": [10, 20, 10]})
    with pytest.raises(InputError, match=r"^stage 0 computes micro-batch 1 where PyTorch finds the loss of 0, and"):
        export_schedule(parsed(differing, swapped), "torch-csv")


def test_a_schedule_that_does_not_fit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it lost its offloads, or never fitted."""
    tight = problems.pipeline(1, 2, 12, problems.stage(offload=(1, 1, 9)))
    offloads = parsed(tight, "0F0 0O0 0D0 0F1 0BW1 0R0 0BW0")
    made = export(offloads, "torch-csv", without_offload=True)
    assert made.costs == ("device 0: 20 B of activations, 11 B with offload, more than the 12 B it has",)
    assert made.misfits == ("device 0 needs 20 B during 0F1 and has 12 B",)
    for to in ("torch-csv", "torch-comms", "megatron", "primus", "json"):
        caplog.clear()
        export_schedule(parsed(tight, "0F0 0F1 0BW0 0BW1" if to != "megatron" else "0F0 0BW0 0F1 0BW1"), to)
        assert ("does not fit" in caplog.text) == (to != "megatron"), to
    assert export(offloads, "json").misfits == export(offloads, "json").costs == ()
    left = leave_out_offload(OFFLOADED)
    assert export_schedule(OFFLOADED, "torch-csv", without_offload=True) == export_schedule(left, "torch-csv")
    assert [certify(TWO, each).device[0].bytes for each in (OFFLOADED, left)] == [11, 20]


def test_primus_offloads_as_soon_as_it_can() -> None:
    """What waits for its offload here is on the host at once there: two at a time, and the host has room for one."""
    costs = problems.stage(offload=(1, 1, 9))
    problem = problems.pipeline(1, 2, 30, costs, device={"host_memory_bytes": 9})
    late = parsed(problem, "0F0 0O0 0D0 0F1 0R0 0BW0 0O1 0D1 0R1 0BW1")
    assert certify(problem, late).fits
    made = export(late, "primus")
    assert "0F1 0O1" in " ".join(made.schedule.programs[0].texts())
    assert [misfit.partition(" during")[0] for misfit in made.misfits] == ["device 0 needs 18 B of host memory"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("S.CSV", "\ufeff0F0, 0F1,,0I0,0W0,0B1\r\n1F0,1I0,,1F1,1I1,1W0,1W1\r\n"),
        ("s.txt", "\ufeff0F0 0F1 0B0 0W0 0BW1\n1F0 1B0 1F1 1B1 1W0 1W1\n"),
        ("s.json", '[["0F0","0F1","0B0","0W0","0BW1"],["1F0","1B0","1F1","1B1","1W0","1W1"]]'),
    ],
)
def test_a_file_is_read_by_its_name(name: str, text: str) -> None:
    read = imported(text, TWO, name)
    assert read.programs == SPLIT.programs
    assert check(TWO, read) == []
    assert export_schedule(read, "torch-csv") == "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.csv", "0F0\n", r"s\.csv: 1 rows, the problem has 2 devices"),
        ("s.csv", "0F0\n1F0,1BW0\n", r"s\.csv, line 2: '1BW0' is no action of PyTorch's pipelining: stage, one of F"),
        ("s.csv", "(0F0;0B1;0B0)OVERLAP_F_B\n1F0", r"s\.csv, line 1: '\(0F0;0B1;0B0\)OVERLAP_F_B' is no action"),
        ("s.csv", "0F0\n0F1\n", r"s\.csv, line 2: 0F1 in the program of device 1: the stage is on another device"),
        ("s.csv", "0F0\n1F2\n", r"s\.csv, line 2: 1F2 in the program of device 1: there are 2 micro-batches"),
        ("s.txt", "0F0\n1I0\n", r"s\.txt, program 2: op '1I0': expected stage, kind"),
        ("s.txt", "0F0\n", r"s\.txt: 1 programs, the problem has 2 devices"),
        ("s.json", '["0F0", "1F0"]', r"s\.json, program 1: a list of op texts is expected"),
        ("s.json", "[[", r"s\.json is not JSON: Expecting"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(text, TWO, name)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_an_action_is_not_read_by_its_beginning(data: st.DataObject) -> None:
    """As torch does, for which 0F1#late is 0F1, and 0BW1 is 0B of no micro-batch."""
    rows = [row.split(",") for row in export_schedule(SPLIT, "torch-comms").splitlines()]
    assert imported("\n".join(map(",".join, rows)), TWO, "s.csv").programs == SPLIT.programs
    row = data.draw(st.sampled_from(rows))
    k = data.draw(st.integers(0, len(row) - 1))
    letters = st.characters(exclude_categories=("Cs", "Nd", "Z", "C"), exclude_characters=",")
    row[k] += data.draw(st.just("#late") | st.text(letters, min_size=1))
    with pytest.raises(InputError, match=r"s\.csv, line \d: .* is no action of PyTorch's pipelining"):
        imported("\n".join(map(",".join, rows)), TWO, "s.csv")


SWAPPED = "0F1 0F0 0BW1 0BW0"
GOLDEN = """{
"format": "optpipe.primus/1",
"pp_size": 2,
"vpp_size": 1,
"micro_batches": 1,
"first_pp_stage_rank": 0,
"last_pp_stage_rank": 1,
"directions": [[{"F":[null,1,null,0],"B":[1,null,0,null]}],
[{"F":[0,null,0,null],"B":[null,0,null,0]}]],
"table": [[["F",0,0,{"should_offload":true}],\
["SF",0,0,{"from_pp_rank":0,"to_pp_rank":1,"time_step":0,"send_to_chunk":0}],\
["O",0,0,null],["R",0,0,null],\
["RB",0,0,{"from_pp_rank":1,"to_pp_rank":0,"time_step":1,"recv_from_chunk":0}],["BW",0,0,null]],
[["RF",0,0,{"from_pp_rank":0,"to_pp_rank":1,"time_step":0,"recv_from_chunk":0}],["F",0,0,null],["B",0,0,null],\
["SB",0,0,{"from_pp_rank":1,"to_pp_rank":0,"time_step":1,"send_to_chunk":0}],["W",0,0,null]]]
}
"""


def texts(exported: str) -> list[str]:
    """Each rank's nodes as Primus prints them."""
    return [" ".join(f"({name}|{j}|{chunk})" for name, j, chunk, _ in row) for row in json.loads(exported)["table"]]


def test_the_form_of_tables_for_primus() -> None:
    with_offload = problems.pipeline(2, 1, 100, problems.stage(offload=(1, 1, 9)))
    assert export_schedule(parsed(with_offload, "0F0 0O0 0D0 0R0 0BW0", "1F0 1B0 1W0"), "primus") == GOLDEN


def test_chunks_in_a_v_hand_messages_to_each_other_on_one_rank() -> None:
    v = problems.pipeline(2, 1, 100, [problems.stage(device=d) for d in (0, 1, 1, 0)])
    document = export_schedule(parsed(v, "0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0"), "primus")
    assert texts(document) == [
        "(F|0|0) (SF|0|0) (RF|0|1) (F|0|1) (BW|0|1) (SB|0|1) (RB|0|0) (BW|0|0)",
        "(RF|0|0) (F|0|0) (SF|0|0) (RF|0|1) (F|0|1) (SF|0|1) (RB|0|1) (BW|0|1) (SB|0|1) (RB|0|0) (BW|0|0) (SB|0|0)",
    ]
    nodes = json.loads(document)["table"][1]
    assert nodes[2:4] == [
        ["SF", 0, 0, {"from_pp_rank": 1, "to_pp_rank": 1, "time_step": 1, "send_to_chunk": 1}],
        ["RF", 0, 1, {"from_pp_rank": 1, "to_pp_rank": 1, "time_step": 1, "recv_from_chunk": 0}],
    ]
    assert json.loads(document)["last_pp_stage_rank"] == 0


@pytest.mark.parametrize(("method", "chunks"), [("zb-h1", 1), ("interleaved", 2)])
def test_any_two_ranks_have_their_messages_in_one_order(method: str, chunks: int) -> None:
    table = json.loads(export_schedule(generate(method, units(4, 8, v=chunks)), "primus"))["table"]
    for a, b in combinations(range(4), 2):
        first, second = (
            [args["time_step"] for *_, args in row if args and {a, b} == {args["from_pp_rank"], args["to_pp_rank"]}]
            for row in (table[a], table[b])
        )
        assert first == second == sorted(set(first))


def test_what_it_has_no_node_for_is_refused() -> None:
    recomputing = problems.pipeline(1, 1, 100, problems.stage(recompute=(1, 9)))
    parted = problems.pipeline(1, 1, 100, problems.stage(offload=(1, 1, 9), offload_parts=2))
    uneven = problems.pipeline(2, 1, 100, [problems.stage(device=d) for d in (0, 1, 1)])
    differing = problems.pipeline(1, 2, 100, problems.stage() | {"forward_ms": [1.0, 2.0]})
    two = problems.pipeline(2, 2, 100, problems.stage())
    for schedule, sentence in (
        (
            parsed(recomputing, "0F0 0C0 0BW0"),
            "0C0 in the program of device 0: Primus has nodes for F, B, W, BW, O, D and R, each alone$",
        ),
        (
            parsed(parted, "0F0 0O0 0D0 0R0 0BW0"),
            "0O0 .*: Primus offloads in one part, stage 0 has offload_parts = 2; ",
        ),
        (
            parsed(uneven, "0F0 0BW0", "1F0 2F0 2BW0 1BW0"),
            "device 1 has 2 stages, device 0 has 1: in Primus all ranks have as many$",
        ),
        (parsed(differing, SWAPPED), "stage 0 computes micro-batch 1 where Primus takes the data of 0, and"),
        (
            parsed(two, "0F0 0F1 0BW1 0BW0", "1F1 1F0 1BW1 1BW0"),
            "stage 1 computes micro-batch 1 before 0, stage 0 after it: in Primus",
        ),
    ):
        with pytest.raises(InputError, match=f"^{sentence}"):
            export_schedule(schedule, "primus")


def test_each_forward_takes_the_next_batch_of_the_data() -> None:
    alike = problems.pipeline(1, 2, 100, problems.stage())
    assert texts(export_schedule(parsed(alike, SWAPPED), "primus")) == ["(F|0|0) (F|1|0) (BW|0|0) (BW|1|0)"]
