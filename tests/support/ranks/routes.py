"""What the ranks run in `test_routes`: micro-batches pass blocks in any order, and begin and end anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline
from support.ranks.cases import LENGTH, WIDTH, Block, Gradients, numbers


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block() for _ in range(count)]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    inputs, targets = torch.randn(2, 2 * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets


def plain(layout: Layout) -> tuple[list[float], Gradients]:
    torch.set_num_threads(1)
    modules, losses = blocks(len(layout.placement)), []
    for j, (x, y) in enumerate(
        zip(*(part.chunk(layout.microbatches) for part in batch(layout.microbatches)), strict=True)
    ):
        for s in layout.route(j):
            x = modules[s](x)
        loss = mse_loss(x, y)
        torch.autograd.backward(loss / layout.microbatches)
        losses.append(loss.item())
    return losses, numbers(dict(enumerate(modules)))


def make(layout: Layout) -> tuple[Pipeline, dict[int, nn.Module]]:
    rank = torch.distributed.get_rank()
    modules = {s: module for s, module in enumerate(blocks(len(layout.placement))) if layout.placement[s] == rank}
    ways = {"routes": layout.routes, "microbatch_routes": layout.microbatch_routes}
    return Pipeline(modules, layout.placement, mse_loss, layout.microbatches, **ways), modules


def train(schedule: Schedule) -> tuple[list[float], Gradients]:
    """One step; the batch only where the rank needs it."""
    layout = Layout.from_problem(schedule.problem)
    pipe, modules = make(layout)
    inputs, targets = batch(layout.microbatches)
    with pipe:
        pipe.load(schedule)
        report = pipe.step(
            inputs if layout.first & modules.keys() else None, targets if layout.last & modules.keys() else None
        )
    return report.losses or [], numbers(modules)


def profile(layout: Layout) -> Problem:
    pipe, _ = make(layout)
    with pipe:
        return pipe.profile(*batch(layout.microbatches), activation_budget_bytes=10**9, repeats=1)


def refusals(mistakes: list[dict[str, Any]]) -> list[str]:
    """What a user is told whose routes are wrong."""
    told = []
    for mistake in mistakes:
        try:
            Pipeline({torch.distributed.get_rank(): nn.Identity()}, [0, 1], mse_loss, 2, **mistake)
        except InputError as error:
            told.append(str(error))
    return told


def tie_nothing() -> str:
    layout = Layout.make([0, 1], 2)
    pipe, _ = make(layout)
    with pipe:
        try:
            pipe.tie(None)
        except InputError as error:
            return str(error)
    return "tied"


def tie_unlike() -> str:
    pipe, modules = make(Layout.make([0, 1], 2))
    with pipe:
        try:
            pipe.tie(next(iter(modules.values())) if torch.distributed.get_rank() else nn.Linear(2, 3))
        except InputError as error:
            return str(error)
    return "tied"
