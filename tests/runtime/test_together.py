"""Swaps, offloads, recomputes, other numbers of micro-batches, replicas with schedules of their own, windows of
gradients, and updates ahead of their norm, all in one training: its numbers are those of a training by one schedule."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases
from support.ranks.cases import Gradients
from support.ranks.post_validation import batch, calm, clipping, placed
from support.ranks.replicas import parameters
from support.ranks.swaps import WAIT, heard
from support.ranks.worker import Ranks
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_solver.systems import generate

SEQUENCES, SWAPS, LEAST_STEPS = 8, 3, 9


class Ran(NamedTuple):
    """On one rank, by step; parameters at the end. `windows`: in how many steps gradients were reduced in windows."""

    losses: list[float | None]
    methods: list[str]
    norms: list[float]
    parameters: Gradients
    windows: int
    logged: list[str]


def trained(schedules: Sequence[Schedule], how: str, max_norm: float, steps: int | None = None) -> Ran:
    """Two ranks, and two replicas or inner peers of each. With so many `steps` by the first schedule, and updates that
    wait for their norm. Without, until each replica has swapped several times: each is offered schedules by chance, and
    updates are ahead of their norm. In both, batches change their shape, on one replica only, and one update is not
    finite."""
    attacked, placement = steps is None, [stage.device for stage in schedules[0].problem.stages]
    (group, replica, number, _), inner, modules = placed(placement, "fsdp" if how == "windows" else how)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    chance, ran, m = random.Random(replica), Ran([], [], [], {}, 0, []), schedules[0].problem.microbatches
    whole = 1 if attacked and how == "windows" else None
    with (
        calm(0),
        heard() as logged,
        Pipeline(modules, placement, mse_loss, m, group=group, inner=inner, whole_gradients=whole) as pipe,
    ):
        pipe.load(schedules[0])
        if attacked:
            pipe.post_validate(optimizer, max_norm)
        while len(ran.methods) < (LEAST_STEPS if steps is None else steps) or (attacked and not _swapped(pipe)):
            step = len(ran.methods)
            assert step < WAIT
            if attacked and number == 0 and not pipe.preparing:
                pipe.offer(chance.choice(schedules))
            more = 2 if replica == 0 and step % 7 in (4, 5) else 1
            ran.losses.append(pipe.step(*batch(step, more, SEQUENCES, replica)).loss)
            ran.methods.append(pipe.schedule.method)
            ran = ran._replace(windows=ran.windows + pipe.runner.rank.reductions.in_windows)
            if step == 6 and number == 1:
                next(p for module in modules.values() for p in module.parameters()).grad.mul_(math.nan)  # type: ignore[union-attr]
            if attacked:
                optimizer.step()
            else:
                ran.norms.append(clipping(pipe, optimizer, max_norm))
            optimizer.zero_grad()
        pipe.synchronize()
        return ran._replace(parameters=parameters(modules), logged=list(logged))


def _swapped(pipe: Pipeline) -> bool:
    least = torch.tensor(pipe.version)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item() > SWAPS


PLACEMENT = [0, 1] * 3
AROUND = [("", ""), ("OD", "R"), ("", "C")]  # what follows an F and precedes its backward


def mixed(schedule: Schedule) -> list[list[str]]:
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
    found = four_ranks(trained, schedules=made, how=how, max_norm=max_norm)
    steps = len(found[0].methods)
    expected = four_ranks(trained, schedules=made, how=how, max_norm=max_norm, steps=steps)
    for ran, plain in zip(found, expected, strict=True):
        for loss, right in zip(ran.losses, plain.losses, strict=True):
            assert loss == (None if right is None else pytest.approx(right, rel=1e-5))
        require_close(ran.parameters, plain.parameters, atol=1e-6)
    assert any(norm > max_norm for norm in expected[0].norms)
    assert any("taken back" in line for line in found[0].logged)
    assert (found[0].methods == found[2].methods) == (how == "inner"), "each replica has its own offers"
    assert (found[0].windows > 0) == (how == "windows")
