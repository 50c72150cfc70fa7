"""Chronos-Offload: what hides behind compute, by the paper's equations and exactly."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest
from support.problems.units import units

from optpipe import InputError, Kind, Problem, Schedule, certify, check
from optpipe.model.ops import OPTIMIZER
from optpipe_solver.systems import generate
from optpipe_solver.systems.order import in_order

F, BW = 1, 2  # units of a chunk


def on_host(p: int, m: int, out: float, update: float, back: float, v: int = 2) -> Problem:
    return units(p, m, v=v, gradient_out_ms=float(out), update_ms=float(update), parameters_in_ms=float(back))


def idle_before_shallow(p: int, backward_ms: float) -> float:
    """Eq. 4: how long a device is idle (ms) in the cool-down before the backwards of chunk 1.

    `backward_ms` is a micro-batch's backward through all 2p chunks.
    """
    return (p - ceil((2 * p - 3) / 6) - 1) * backward_ms / (2 * p)


def idle_before_deep(p: int, forward_ms: float) -> float:
    """Eq. 6: likewise in the warm-up before the forwards of chunk 2."""
    return (p - ceil((p - 3) / 6) - 1) * forward_ms / (2 * p)


def fits_in_bubbles(problem: Problem) -> bool:
    """Eq. 5 and 7 for two chunks a device: whether optimizers fit into what Chronos-Pipe leaves idle.

    Sufficient, not necessary: they run beside compute, and other devices' drain and fill last longer.
    """
    p = len(problem.stages) // 2
    ms = problem.costs.ms[..., 0]
    step, upload = ms[[Kind.G, Kind.U]].sum(axis=0).max(), ms[Kind.P].max()
    backward, forward = float(ms[Kind.BW].sum()), float(ms[Kind.F].sum())
    return bool(step <= idle_before_shallow(p, backward) + 1e-9 and upload <= idle_before_deep(p, forward) + 1e-9)


def overlap(schedule: Schedule) -> float:
    """The share of the host optimizers' time that hides behind compute, of the devices where they take longest."""
    problem = schedule.problem
    spent = [0.0, 0.0]
    without = []
    for program in schedule.programs:
        ops = [op for op in program.ops() if op.kind in OPTIMIZER]
        inward = sum(float(problem.costs.ms[op.kind, op.stage, op.microbatch]) for op in ops if op.kind == Kind.P)
        outward = sum(float(problem.costs.ms[op.kind, op.stage, op.microbatch]) for op in ops if op.kind != Kind.P)
        spent = [max(spent[0], inward), max(spent[1], outward)]
        without.append([op for op in program.ops() if op.kind not in OPTIMIZER])
    grown = schedule.makespan_ms - in_order(problem, without).makespan_ms
    return max(0.0, 1.0 - grown / sum(spent)) if sum(spent) else 1.0


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 4, 13])
def test_an_iteration_is_longer_by_what_does_not_hide(p, m):
    for back, step in product((0.5, p * F, p * F + 1.5, 3 * p), (0.5, p * BW, p * BW + 2, 5 * p)):
        problem = on_host(p, m, step / 4, 3 * step / 4, back)
        schedule, plain = generate("chronos-offload", problem), generate("chronos", problem)
        assert check(problem, schedule) == []
        grown = max(0.0, back - p * F) + max(0.0, step - p * BW)
        assert schedule.makespan_ms == pytest.approx(plain.makespan_ms + grown)
        assert overlap(schedule) == pytest.approx(1 - grown / (back + step))
        assert [peak.bytes for peak in certify(problem, schedule).device] == [
            peak.bytes for peak in certify(problem, plain).device
        ]


@pytest.mark.parametrize("p", [3, 4, 7, 8, 16])
def test_where_equations_5_and_7_hold_all_of_it_hides(p):
    step, back = idle_before_shallow(p, 2 * p * BW), idle_before_deep(p, 2 * p * F)
    problem = on_host(p, 2 * p, step / 2, step / 2, back)
    assert fits_in_bubbles(problem)
    assert overlap(generate("chronos-offload", problem)) == 1.0
    assert not fits_in_bubbles(on_host(p, 2 * p, step / 2, step / 2 + 0.01, back))
    assert not fits_in_bubbles(on_host(p, 2 * p, step / 2, step / 2, back + 0.01))


def test_what_it_needs_is_one_sentence():
    with pytest.raises(
        InputError, match=r"^stages\[4\]\.update_ms is missing: chronos-offload updates stages 4 to 7 on the host$"
    ):
        generate("chronos-offload", units(4, 8, v=2))
    with pytest.raises(
        InputError, match=r"^chunks = 2: expected 1 to 1, the shallowest chunk of a device is updated there$"
    ):
        generate("chronos-offload:chunks=2", on_host(4, 8, 1, 1, 1))


def test_programs_as_in_the_figure():
    schedule = generate("chronos-offload", on_host(2, 1, 1, 1, 1))
    assert [program.texts() for program in schedule.programs] == [
        ["2P0", "0F0", "2F0", "2BW0", "2G0", "2U0", "0BW0"],
        ["3P0", "1F0", "3F0", "3BW0", "3G0", "3U0", "1BW0"],
    ]
