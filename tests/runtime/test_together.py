"""Swaps, offloads, recomputes, other numbers of micro-batches, replicas with schedules of their own, windows of
gradients, and updates ahead of their norm, all in one training: its numbers are those of a training by one schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.close import require_close
from support.ranks import cases, together
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule
from optpipe_solver.systems import generate

PLACEMENT = [0, 1] * 3
AROUND = [("", ""), ("OD", "R"), ("", "C")]  # what follows an F and precedes its backward


def mixed(schedule: Schedule) -> list[list[str]]:
    """The schedule with some activations offloaded, others recomputed."""
    programs = []
    for program in schedule.programs:
        texts: list[str] = []
        for op in program.ops():
            after, before = AROUND[(op.stage + op.microbatch) % 3] if op.kind.name in ("F", "B", "BW") else ("", "")
            own = [*before, op.kind.name] if op.kind.name != "F" else ["F", *after]
            texts += [f"{op.stage}{kind}{op.microbatch}" for kind in own]
        programs.append(texts)
    return programs


def schedules() -> list[Schedule]:
    made = []
    for m, method in ((4, "chronos-zero2:group=2"), (4, "chronos"), (8, "chronos"), (2, "chronos")):
        problem = cases.problem(PLACEMENT, m)
        found = generate(method, problem)
        made += [
            replace(found, method=f"{method} {m}"),
            replace(Schedule.parse(problem, mixed(found)), method=f"{method} {m}, mixed"),
        ]
    return made


@pytest.mark.parametrize(
    "how", ["windows", *(pytest.param(how, marks=pytest.mark.soak) for how in ("ddp", "fsdp", "inner"))]
)
def test_whatever_happens_together_changes_no_number(four_ranks: Ranks, how: str) -> None:
    made, max_norm = schedules(), 0.02
    found = four_ranks(together.trained, schedules=made, how=how, max_norm=max_norm)
    steps = len(found[0].methods)
    expected = four_ranks(together.trained, schedules=made, how=how, max_norm=max_norm, steps=steps)
    for ran, plain in zip(found, expected, strict=True):
        for loss, right in zip(ran.losses, plain.losses, strict=True):
            assert loss == (None if right is None else pytest.approx(right, rel=1e-5))
        require_close(ran.parameters, plain.parameters, atol=1e-6)
    assert any(norm > max_norm for norm in expected[0].norms)
    assert any("taken back" in line for line in found[0].logged)
    assert (found[0].methods == found[2].methods) == (how == "inner"), "each replica has its own offers"
    assert (found[0].windows > 0) == (how == "windows")
