"""Two ranks run schedules on a real model: losses and gradients are those of a plain run, to the bit where sums have
the same order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.ranks import cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks.worker import Ranks
from support.strategies import schedules

from optpipe.model.ops import COMPUTE
from optpipe.schedule import Schedule

ONE_F_ONE_B = [
    ["0F0", "0F1", "0BW0", "0F2", "0BW1", "0F3", "0BW2", "0BW3"],
    ["1F0", "1BW0", "1F1", "1BW1", "1F2", "1BW2", "1F3", "1BW3"],
]
SPLIT = [
    ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0W0", "0B2", "0W1", "0B3", "0W2", "0W3"],
    ["1F0", "1B0", "1F1", "1W0", "1B1", "1F2", "1W1", "1B2", "1F3", "1B3", "1W2", "1W3"],
]
OFFLOADED = [
    [
        "0F0",
        "0O0",
        "0D0",
        "0F1",
        "0O1",
        "0F2",
        "0D1",
        "0R0",
        "0B0",
        "0W0",
        "0R1",
        "0F3",
        "0B1",
        "0W1",
        "0B2",
        "0W2",
        "0B3",
        "0W3",
    ],
    ["1F0", "1O0", "1D0", "1R0", "1BW0", "1F1", "1O1", "1F2", "1D1", "1R1", "1B1", "1W1", "1BW2", "1F3", "1BW3"],
]
RECOMPUTED = [
    ["0F0", "0F1", "0C0", "0BW0", "0F2", "0BW1", "0F3", "0C2", "0B2", "0W2", "0BW3"],
    ["1F0", "1C0", "1BW0", "1F1", "1BW1", "1F2", "1BW2", "1F3", "1C3", "1B3", "1W3"],
]
V_SHAPED = [  # stages 0 and 3 on rank 0, 1 and 2 on rank 1
    [
        "0F0",
        "0F1",
        "0O1",
        "3F0",
        "0D1",
        "3B0",
        "0F2",
        "3F1",
        "3W0",
        "3B1",
        "0B0",
        "0R1",
        "3W1",
        "3F2",
        "0W0",
        "0B1",
        "3BW2",
        "0W1",
        "0BW2",
    ],
    ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "1F2", "2F2", "2W0", "2B1", "1W0", "1B1", "2W1", "1W1", "2BW2", "1BW2"],
]


def same(ranks: Ranks, placement: list[int], programs: list[Any], exact: bool = True, **stage: Any) -> list[Any]:
    """Trains one step with each schedule on two ranks and compares with the plain run; returns the ranks' reports."""
    microbatches = sum(text.startswith("0F") for program in programs[0] for text in program)
    problem = cases.problem(placement, microbatches, **stage)
    schedules = [Schedule.parse(problem, texts) for texts in programs]
    results = ranks(cases.train, placement=placement, schedules=schedules)
    losses, gradients = cases.plain(len(placement), microbatches, len(programs))
    for step in range(len(programs)):
        assert results[placement[-1]][0][step].losses == losses[step]
        found = {name: grad for _, by_step in results for name, grad in by_step[step].items()}
        assert found.keys() == gradients[step].keys()
        for name, grad in found.items():
            if exact:
                np.testing.assert_array_equal(grad, gradients[step][name], err_msg=f"step {step}, {name}")
            else:
                np.testing.assert_allclose(
                    grad, gradients[step][name], rtol=1e-4, atol=1e-7, err_msg=f"step {step}, {name}"
                )
    return [reports for reports, _ in results]


@pytest.mark.parametrize(
    "programs", [ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED], ids=["1f1b", "split", "offloaded", "recomputed"]
)
def test_same_bits_as_plain_autograd(ranks: Ranks, programs: list[list[str]]) -> None:
    same(ranks, [0, 1], [programs])


def test_same_bits_with_two_chunks_on_a_rank(ranks: Ranks) -> None:
    same(ranks, [0, 1, 1, 0], [V_SHAPED])


def test_swaps_between_steps_change_nothing(ranks: Ranks) -> None:
    reports = same(ranks, [0, 1], [ONE_F_ONE_B, OFFLOADED, SPLIT, RECOMPUTED])
    assert [report.version for report in reports[0]] == [1, 2, 3, 4]


@settings(max_examples=12)
@given(st.data(), st.sampled_from([[0, 1], [0, 1, 1, 0], [1, 0, 1], [0, 0]]))
def test_any_valid_schedule_gives_the_same_sums(ranks: Ranks, data: Any, placement: list[int]) -> None:
    problem = cases.problem(placement, 3, offload_parts=2)
    schedule = data.draw(schedules(problem))
    same(ranks, placement, [[program.texts() for program in schedule.programs]], exact=False, offload_parts=2)


def test_tied_embeddings_get_the_sum_of_both_gradients(ranks: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), ONE_F_ONE_B)
    (first, whole), (last, _) = ranks(cases.tied, placement=[0, 1], schedule=schedule)
    for step in range(2):
        np.testing.assert_array_equal(first[step]["tied"], last[step]["tied"])
    np.testing.assert_allclose(first[1]["tied"], whole["tied"], rtol=1e-4, atol=1e-7)


def test_the_trace_has_every_op_in_its_place(ranks: Ranks) -> None:
    for rank, (report,) in enumerate(same(ranks, [0, 1], [OFFLOADED])):
        assert [str(time.op) for time in report.trace] == OFFLOADED[rank]
        ended = {str(time.op): time.end_ms for time in report.trace}
        assert all(0 <= time.start_ms <= time.end_ms <= report.step_ms for time in report.trace)
        assert ended[f"{rank}O0"] <= ended[f"{rank}D0"] <= ended[f"{rank}R0"]
        compute = [time for time in report.trace if time.op.kind in COMPUTE]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(compute))


def test_what_no_later_stage_uses_gets_no_gradient(ranks: Ranks) -> None:
    """None as in a plain run, not zeros, which an optimizer with momentum or weight decay would take for a gradient."""
    placement = [0, 1, 0]
    programs = [
        ["0F0", "0F1", "2F0", "2BW0", "2F1", "0B0", "2B1", "0W0", "2W1", "0BW1"],
        ["1F0", "1F1", "1B0", "1W0", "1BW1"],
    ]
    results = ranks(
        cases.with_branches,
        placement=placement,
        schedule=Schedule.parse(cases.problem(placement, 2), programs),
    )
    modules = cases.branches()
    for _ in range(2):
        x: Any = (torch.ones(2, cases.WIDTH),)
        for module in modules:
            x = module(*x)
        torch.autograd.backward(cases.first_of(x, torch.zeros(2, cases.WIDTH)) / 2)
    plain = cases.numbers(dict(enumerate(modules)))
    found = {name: grad for _, gradients in results for name, grad in gradients.items()}
    assert found.keys() == plain.keys() == {f"{s}.layers.0.{name}" for s in range(3) for name in ("weight", "bias")}
    for name, grad in found.items():
        np.testing.assert_allclose(grad, plain[name], rtol=1e-5, atol=1e-9, err_msg=name)
