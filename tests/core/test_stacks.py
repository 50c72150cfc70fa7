"""Schedules as arguments of Megatron (`make stacks` compares its orders with the package's), and as tables for Primus'
launcher (what is expected was written by hand, in the form of its sources)."""

import json
import re
from itertools import combinations

import pytest
from support import problems
from support.problems import parsed
from support.problems.units import units

from optpipe import InputError, Schedule, export_schedule
from optpipe.formats import megatron
from optpipe.model.placement import Placement
from optpipe.model.program import Program
from optpipe_solver.systems import generate

EMBEDDING, LAYER, HEAD = (problems.stage((n, n, n)) for n in (1, 4, 8))
OURS = "; optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"


@pytest.mark.parametrize(("p", "m", "group"), [(2, 8, 2), (2, 8, 4), (2, 7, 5), (3, 9, 9), (2, 5, 3)])
def test_the_group_is_found_by_the_order(p: int, m: int, group: int) -> None:
    programs = tuple(map(Program.from_items, megatron.order(p, 3, m, group)))
    found = export_schedule(Schedule(units(p, m, v=3), programs), "megatron").splitlines()
    assert found[1] == "--num-virtual-stages-per-pipeline-rank 3"
    (text,) = re.findall(r"^--microbatch-group-size-per-virtual-pipeline-stage (\d+)$", found[2])
    assert megatron.order(p, 3, m, int(text)) == megatron.order(p, 3, m, group)


@pytest.mark.parametrize(("p", "m", "has"), [(4, 8, True), (2, 3, True), (4, 11, True), (3, 10, False), (4, 3, False)])
def test_it_has_the_order_or_not(p: int, m: int, has: bool) -> None:
    """Groups of p, of 3, of 6 and 5; not of 4, 3 and 3, nor fewer than ranks."""
    schedule = generate("interleaved", units(p, m, v=2))
    assert megatron.has_order(schedule) == has
    assert export_schedule(generate("1f1b", units(p, m)), "megatron") == f"--pipeline-model-parallel-size {p}\n"
    if not has:
        refusal(schedule)


@pytest.mark.parametrize(
    ("chunks", "cuts", "layout"),
    [(1, (4, 2), "Ettt|tL"), (2, (3, 1, 1, 1), "Ett|t|t|L"), (2, (1, 2, 2, 1), "E|tt|tt|L")],
)
def test_the_layout_names_the_layers_of_each_stage(chunks: int, cuts: tuple[int, ...], layout: str) -> None:
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=[EMBEDDING, *[LAYER] * 4, HEAD])
    problem = Placement(chunks=chunks, layers=cuts).apply(row)
    found = export_schedule(generate("interleaved" if chunks > 1 else "1f1b", problem), "megatron").splitlines()
    assert found[1] == f"--pipeline-model-parallel-layout {layout}"
    assert not any("num-virtual-stages" in line for line in found)


def refusal(schedule: Schedule) -> str:
    with pytest.raises(InputError) as refused:
        export_schedule(schedule, "megatron")
    return str(refused.value)


OFFLOADED = problems.pipeline(1, 1, 100, problems.stage(offload=(1, 1, 9)))
LAYERED = problems.pipeline(2, 2, 100, problems.stage((9, 9, 9)), layers=[EMBEDDING, LAYER, LAYER, HEAD])


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (generate("zb-h1", units(4, 8)), "device 3 has 3B0 where Megatron's 1F1B has 3BW0" + OURS),
        (generate("gpipe", units(2, 4)), "device 1 has 1F1 where Megatron's 1F1B has 1BW0" + OURS),
        (
            parsed(OFFLOADED, "0F0 0O0 0D0 0R0 0BW0"),
            "device 0 has 0O0 where Megatron's 1F1B has 0BW0; --without-offload (in Python without_offload=True) "
            "leaves offloads out" + OURS,
        ),
        (generate("zb-v", units(2, 4, v=2, shape="v")), "stages[2].device = 1: Megatron has stage 2 on rank 0" + OURS),
        (
            generate("interleaved", units(4, 3, v=2)),
            "microbatches = 3: with 2 chunks a rank Megatron needs at least 4" + OURS,
        ),
        (generate("1f1b", LAYERED), "stages[0] does not consist of layers 0 and on of the problem: leave layers out"),
    ],
)
def test_another_order_or_placement_is_refused_and_what_differs_is_named(schedule: Schedule, said: str) -> None:
    assert refusal(schedule) == said


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
