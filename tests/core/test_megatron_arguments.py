"""Schedules as arguments of Megatron: those that are Megatron's own, and how others are refused. `make stacks` compares
these orders with the package's."""

from __future__ import annotations

import re

import pytest
from support import problems
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
            Schedule.parse(OFFLOADED, [["0F0", "0O0", "0D0", "0R0", "0BW0"]]),
            "device 0 has 0O0 where Megatron's 1F1B has 0BW0; --without-offload (in Python without_offload=True) "
            "leaves offloads out" + OURS,
        ),
        (
            generate("zb-v", units(2, 4, v=2, shape="v")),
            "stages[2].device = 1: Megatron has stage 2 on rank 0" + OURS,
        ),
        (
            generate("interleaved", units(4, 3, v=2)),
            "microbatches = 3: with 2 chunks a rank Megatron needs at least 4" + OURS,
        ),
        (
            generate("1f1b", LAYERED),
            "stages[0] does not consist of layers 0 and on of the problem: leave layers out",
        ),
    ],
)
def test_another_order_or_placement_is_refused_and_what_differs_is_named(schedule: Schedule, said: str) -> None:
    assert refusal(schedule) == said
