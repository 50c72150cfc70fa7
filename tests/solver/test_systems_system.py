"""`System.placement`: which problems have the stages that a system is for already."""

from __future__ import annotations

import pytest
from support.problems.units import units

from optpipe import InputError
from optpipe.model.placement import Placement, rechunk
from optpipe.process.protocol import Request
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.systems.classic import one_f_one_b
from optpipe_solver.systems.system import System

ROW = System("row", "", one_f_one_b)
LOOPED = System("looped", "", one_f_one_b, least=2, most=None, chunks=2)
V = System("v", "", one_f_one_b, least=2, most=2, chunks=2, shape="v")
TWO_WAYS = System("two-ways", "", one_f_one_b, shape="bidirectional")

PROBLEMS = {
    "row": units(4, 6),
    "looped": units(4, 6, v=2),
    "v": units(4, 6, v=2, shape="v"),
    "two-ways": rechunk(units(4, 6), 1, "bidirectional"),
}


@pytest.mark.parametrize("system", [ROW, LOOPED, V, TWO_WAYS], ids=lambda system: system.name)
def test_only_its_own_stages_count_as_such(system):
    for name, problem in PROBLEMS.items():
        if name == system.name:
            assert system.placement(problem, "keep") is None
        else:
            with pytest.raises(InputError, match=f"^{system.name} needs "):
                system.placement(problem, "keep")


def test_two_ways_may_be_taken_in_any_order_and_cost_something_else():
    problem = PROBLEMS["two-ways"].replace(microbatch_routes=[1, 1, 0, 1, 1, 1])
    uneven = [stage.model_dump(exclude_none=True) | {"forward_ms": 1.0 + s} for s, stage in enumerate(problem.stages)]
    assert TWO_WAYS.placement(problem.replace(stages=uneven), "keep") is None
    turned = [stage.model_dump(exclude_none=True) | {"device": stage.device ^ 1} for stage in problem.stages[4:]]
    with pytest.raises(InputError, match=r"^two-ways needs one stage a device each way, on two routes"):
        TWO_WAYS.placement(problem.replace(stages=[*problem.stages[:4], *turned]), "keep")


def test_what_it_is_given_is_its_own():
    row = PROBLEMS["row"].replace(overlap_factor=0.9)
    for system in (LOOPED, V, TWO_WAYS):
        placement = system.placement(row, "all")
        assert placement == Placement(chunks=system.chunks, shape=system.shape)
        assert system.placement(placement.apply(row), "keep") is None


def test_where_it_may_choose_it_takes_as_many_chunks_as_it_would_if_the_layers_allow():
    system = System("any", "", one_f_one_b, most=None, chunks=2)
    row = PROBLEMS["row"]
    assert system.placement(row, "keep") is None
    assert system.placement(row, "all") == Placement(chunks=2)
    assert system.placement(units(4, 6, v=3), "all") is None
    layers = [stage.model_dump(exclude={"device"}, exclude_none=True) for stage in row.stages]
    assert system.placement(row.replace(layers=layers), "all") is None


def test_of_two_ways_no_other_stages_are_made():
    with pytest.raises(InputError, match=r"^routes: there are 2, a placement is for one route only"):
        LOOPED.placement(PROBLEMS["two-ways"], "all").apply(PROBLEMS["two-ways"])


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "1f1b",
            "1f1b needs one stage a device, all in one row: the problem has other stages (with all placements it "
            "is given them)",
        ),
        ("1f1b:group=2", "method = '1f1b:group=2': 1f1b has no parameter group (its parameters: none)"),
        ("1f1b:", "method = '1f1b:': '' is no parameter: "),
    ],
)
def test_a_system_that_is_not_for_the_stages_is_one_sentence(method, told):
    with pytest.raises(InputError) as raised:
        Portfolio(Request(problem=PROBLEMS["looped"], method=method), print)
    assert str(raised.value).startswith(told)
