"""Schedules as arguments of Megatron: those that are Megatron's own, and how others are refused. `make stacks` compares
these orders with the package's."""

from __future__ import annotations

import re

import pytest
from support import problems
from support.units import units

from optpipe import InputError, Schedule, export_schedule
from optpipe.formats import megatron
from optpipe.model.placement import Placement
from optpipe.model.program import Program
from optpipe_solver.systems import generate

EMBEDDING, LAYER, HEAD = (problems.stage((n, n, n)) for n in (1, 4, 8))
OURS = "; optpipe_runtime.megatron.forward_backward_func runs the schedule as it is"


def test_1f1b_has_nothing_but_the_ranks() -> None:
    assert export_schedule(generate("1f1b", units(4, 8)), "megatron") == "--pipeline-model-parallel-size 4\n"


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
    if not has:
        refusal(schedule)


def test_published_interleaving_is_megatrons() -> None:
    found = export_schedule(generate("interleaved", units(4, 8, v=2)), "megatron")
    assert found.splitlines()[-1] == "--microbatch-group-size-per-virtual-pipeline-stage 4"


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


def test_the_first_op_that_differs_is_named() -> None:
    found = refusal(generate("zb-h1", units(4, 8)))
    assert found == "device 3 has 3B0 where Megatron's 1F1B has 3BW0" + OURS
    more = refusal(generate("gpipe", units(2, 4)))
    assert more == "device 1 has 1F1 where Megatron's 1F1B has 1BW0" + OURS


def test_offloads_are_refused_with_what_leaves_them_out() -> None:
    problem = problems.pipeline(1, 1, 100, problems.stage(offload=(1, 1, 9)))
    found = Schedule.parse(problem, [["0F0", "0O0", "0D0", "0R0", "0BW0"]])
    assert refusal(found) == (
        "device 0 has 0O0 where Megatron's 1F1B has 0BW0; --without-offload (in Python without_offload=True) leaves "
        "offloads out" + OURS
    )
    assert export_schedule(found, "megatron", without_offload=True) == "--pipeline-model-parallel-size 1\n"


def test_other_placements_are_refused() -> None:
    assert refusal(generate("zb-v", units(2, 4, v=2, shape="v"))) == (
        "stages[2].device = 1: Megatron has stage 2 on rank 0" + OURS
    )
    assert refusal(generate("interleaved", units(4, 3, v=2))) == (
        "microbatches = 3: with 2 chunks a rank Megatron needs at least 4" + OURS
    )


def test_layers_that_stages_do_not_consist_of() -> None:
    problem = problems.pipeline(2, 2, 100, problems.stage((9, 9, 9)), layers=[EMBEDDING, LAYER, LAYER, HEAD])
    assert refusal(generate("1f1b", problem)) == (
        "stages[0] does not consist of layers 0 and on of the problem: leave layers out"
    )
