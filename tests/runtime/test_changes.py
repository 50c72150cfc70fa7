"""Between steps a user evaluates, takes batches of another size, freezes parameters, turns autocast on: results are
those of a plain run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.ranks import cases
from support.ranks.cases import LENGTH, WIDTH, Gradients, numbers, pipeline
from support.ranks.programs import ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule


class Turn(NamedTuple):
    """One step, or one evaluation; `sequences` in a micro-batch, whether the first stage is frozen, and autocast, by
    which what passes between the stages has another type."""

    train: bool
    sequences: int = 2
    frozen: bool = False
    autocast: bool = False


class Seen(NamedTuple):
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


def take_turns(schedule: Schedule, taken: Sequence[Turn]) -> list[Seen]:
    rank, m = torch.distributed.get_rank(), schedule.problem.microbatches
    modules, found = {rank: stages()[rank]}, []
    with pipeline(modules, schedule, mse_loss) as pipe:
        for turn in taken:
            prepared(modules, turn)
            inputs, targets = batch(turn, m)
            ours = (
                inputs if rank == 0 else None,
                targets if rank == 1 else None,
            )  # the other rank cannot see what has changed
            with torch.autocast("cpu", torch.bfloat16, turn.autocast):
                report = pipe.step(*ours) if turn.train else pipe.evaluate(*ours)
            found.append(seen(report.losses, modules))
    return found


def plainly(microbatches: int, taken: Sequence[Turn]) -> list[Seen]:
    torch.set_num_threads(1)
    modules, found = dict(enumerate(stages())), []
    for turn in taken:
        prepared(modules, turn)
        losses = []
        for x, y in zip(*(part.chunk(microbatches) for part in batch(turn, microbatches)), strict=True):
            with torch.set_grad_enabled(turn.train), torch.autocast("cpu", torch.bfloat16, turn.autocast):
                loss = mse_loss(modules[1](modules[0](x)), y)
            if turn.train:
                torch.autograd.backward(loss / microbatches)
            losses.append(loss.item())
        found.append(seen(losses, modules))
    return found


TRAIN, EVALUATE = Turn(train=True), Turn(train=False)


@pytest.mark.parametrize("programs", [ONE_F_ONE_B, SPLIT, RECOMPUTED], ids=["1f1b", "split", "recomputed"])
@pytest.mark.parametrize(
    "turns",
    [
        [EVALUATE, TRAIN, EVALUATE, EVALUATE, TRAIN],
        [TRAIN, Turn(True, sequences=3), TRAIN, Turn(False, sequences=5), TRAIN],
        [Turn(True, frozen=True), TRAIN, Turn(True, frozen=True)],
        [TRAIN, Turn(True, autocast=True), Turn(False, autocast=True), TRAIN],
    ],
    ids=["evaluations", "shapes", "freezing", "autocast"],
)
def test_every_phase_equals_a_plain_run(ranks: Ranks, programs: list[list[str]], turns: list[Turn]) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), programs)
    results = ranks(take_turns, schedule=schedule, taken=turns)
    for turn, expected, *found in zip(turns, plainly(4, turns), *results, strict=True):
        assert found[1].losses == expected.losses, turn
        assert found[0].means | found[1].means == expected.means, turn
        gradients = found[0].gradients | found[1].gradients
        assert bool(gradients) == turn.train
        np.testing.assert_equal(gradients, expected.gradients, err_msg=str(turn))
