"""What the ranks run in `test_changes`: training and evaluation in turn, while the batch and the stages change in
between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import LENGTH, WIDTH, Gradients, numbers


class Turn(NamedTuple):
    """One step, or one evaluation; `sequences` in a micro-batch, and whether the first stage is frozen."""

    train: bool
    sequences: int = 2
    frozen: bool = False


class Seen(NamedTuple):
    """After a turn: losses where there are some, gradients, and the running means of the norms, by stage."""

    losses: list[float]
    gradients: Gradients
    means: dict[int, list[float]]


def stages() -> list[nn.Module]:
    torch.manual_seed(8)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(2)
    ]


def batch(turn: Turn, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(turn.sequences)
    inputs, targets = torch.randn(2, turn.sequences * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets


def prepared(modules: dict[int, nn.Module], turn: Turn) -> None:
    for s, module in modules.items():
        module.train(turn.train).requires_grad_(not (turn.frozen and s == 0)).zero_grad()


def seen(losses: list[float] | None, modules: dict[int, nn.Module]) -> Seen:
    means = {s: module.get_submodule("1").running_mean.tolist() for s, module in modules.items()}  # type: ignore[operator,union-attr]
    return Seen(losses or [], numbers(modules), means)


def turns(schedule: Schedule, taken: Sequence[Turn]) -> list[Seen]:
    rank, m = torch.distributed.get_rank(), schedule.problem.microbatches
    modules, found = {rank: stages()[rank]}, []
    with Pipeline(modules, [0, 1], mse_loss, m) as pipe:
        pipe.load(schedule)
        for turn in taken:
            prepared(modules, turn)
            inputs, targets = batch(turn, m)
            ours = (
                inputs if rank == 0 else None,
                targets if rank == 1 else None,
            )  # the other rank cannot see what has changed
            report = pipe.step(*ours) if turn.train else pipe.evaluate(*ours)
            found.append(seen(report.losses, modules))
    return found


def plain(microbatches: int, taken: Sequence[Turn]) -> list[Seen]:
    torch.set_num_threads(1)
    modules, found = dict(enumerate(stages())), []
    for turn in taken:
        prepared(modules, turn)
        losses = []
        for x, y in zip(*(part.chunk(microbatches) for part in batch(turn, microbatches)), strict=True):
            with torch.set_grad_enabled(turn.train):
                loss = mse_loss(modules[1](modules[0](x)), y)
            if turn.train:
                torch.autograd.backward(loss / microbatches)
            losses.append(loss.item())
        found.append(seen(losses, modules))
    return found
