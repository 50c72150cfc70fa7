"""What the ranks run in `test_microbatches`: steps and evaluations with micro-batches of different shapes, and the
plain run that they must equal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepMemoryError
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps, StepReport
from optpipe_runtime.execute import learner
from optpipe_runtime.steps import planned as planned_steps
from support.ranks.cases import WORDS, Gradients, loss_fn, make_stages, numbers, own_stages, sgd
from support.ranks.device import device
from support.ranks.replicas import gradients, place


class Sizes(NamedTuple):
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class Turn(NamedTuple):
    sizes: tuple[Sizes, ...]
    train: bool = True
    weighted: bool = False

    @property
    def weights(self) -> list[float] | None:
        return [float(size.tokens) for size in self.sizes] if self.weighted else None


FIRST = Turn((Sizes(2, 9), Sizes(1, 16), Sizes(3, 4), Sizes(2, 12)))
COUNTS = [
    FIRST,
    Turn((Sizes(2, 9), Sizes(2, 20), Sizes(1, 5), Sizes(2, 12), Sizes(1, 33), Sizes(1, 7)), weighted=True),
    Turn((Sizes(1, 30), Sizes(1, 8), Sizes(2, 6))),
    Turn((Sizes(1, 11), Sizes(2, 18), Sizes(3, 5), Sizes(1, 6), Sizes(2, 13)), weighted=True),
]
EVALUATED = Turn((Sizes(2, 7), Sizes(1, 50), Sizes(2, 3), Sizes(1, 4), Sizes(1, 5)), train=False)


class MeasuredStep(NamedTuple):
    """After a turn; `learned` is how many stages were learned in it."""

    losses: list[float]
    loss: float | None
    gradients: Gradients
    learned: int = 0


def batch(turn: Turn, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(WORDS, (rows, length + 1), generator=generator).to(device()) for rows, length in turn.sizes]
    return [each[:, :-1].contiguous() for each in tokens], [each[:, 1:].contiguous() for each in tokens]


def factors(turn: Turn, total: float | None = None) -> list[float]:
    """By what the gradient of each loss is multiplied, before they are divided by their number."""
    if turn.weights is None:
        return [1.0] * len(turn.sizes)
    return [weight * len(turn.sizes) / (total or sum(turn.weights)) for weight in turn.weights]


def plain_turn(modules: Sequence[nn.Module], turn: Turn, seed: int, total: float | None = None) -> list[float]:
    losses = []
    for x, y, factor in zip(*batch(turn, seed), factors(turn, total), strict=True):
        with torch.set_grad_enabled(turn.train):
            for module in modules:
                x = module(x)
            value = loss_fn(x, y)
        if turn.train:
            torch.autograd.backward(value, torch.full_like(value, factor))
        losses.append(value.item())
    for module in modules if turn.train else ():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(turn.sizes)
    return losses


class Expected(NamedTuple):
    losses: list[float]
    gradients: Gradients
    evaluated: list[float]


def plain(stages: int | list[nn.Module], turns: Sequence[Turn], max_norm: float = 0.0) -> list[Expected]:
    """Of those modules, or of so many stages of `make_stages`."""
    torch.set_num_threads(1)
    modules = make_stages(stages) if isinstance(stages, int) else stages
    optimizer = sgd(*modules)
    seen = []
    for seed, turn in enumerate(turns):
        optimizer.zero_grad()
        losses, found = plain_turn(modules, turn, seed), numbers(dict(enumerate(modules)))
        if max_norm:
            nn.utils.clip_grad_norm_([p for module in modules for p in module.parameters()], max_norm)
        optimizer.step()
        seen.append(Expected(losses, found, plain_turn(modules, EVALUATED, 99)))
    return seen


def given(turn: Turn, seed: int, takes: Sequence[int], number: int, stages: int) -> dict[str, Any]:
    """What a rank knows of a step: inputs where it has the first stage, targets and weights where it has the last."""
    inputs, targets = batch(turn, seed)
    return {
        "inputs": Microbatches(inputs) if 0 in takes else None,
        "targets": Microbatches(targets) if stages - 1 in takes else None,
        "weights": turn.weights if stages - 1 in takes else None,
    }


def turns(schedule: Schedule, taken: Sequence[Turn]) -> list[MeasuredStep]:
    placement = [stage.device for stage in schedule.problem.stages]
    number, seen = dist.get_rank(), []
    modules = own_stages(placement)
    optimizer = sgd(*modules.values())
    with (
        Pipeline(modules, placement, loss_fn, schedule.problem.microbatches) as pipe,
        patch.object(learner, "learn", wraps=learner.learn) as learn,
    ):
        pipe.load(schedule)
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            learn.reset_mock()
            step = pipe.step if turn.train else pipe.evaluate
            report: StepReport = step(**given(turn, seed, list(modules), number, len(placement)))
            seen.append(MeasuredStep(report.losses or [], report.loss, numbers(modules), learn.call_count))
            optimizer.step()
    return seen


def plain_replicas(stages: int, turns: Sequence[Turn]) -> list[tuple[list[float], Gradients]]:
    """Two replicas, of which each takes every other turn: the losses of both, and the gradients that they share."""
    torch.set_num_threads(1)
    modules = make_stages(stages)
    optimizer = sgd(*modules)
    seen = []
    for step in range(len(turns) // 2):
        optimizer.zero_grad()
        pair = turns[2 * step : 2 * step + 2]
        total = sum(sum(turn.weights or [0.0]) for turn in pair)
        losses, added = [], dict[str, Any]()
        for turn in pair:
            optimizer.zero_grad()
            losses += plain_turn(modules, turn, step, total)
            for name, gradient in numbers(dict(enumerate(modules))).items():
                added[name] = added.get(name, 0.0) + gradient * (1.0 if turn.weighted else 0.5)
        for s, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                parameter.grad = torch.from_numpy(added[f"{s}.{name}"])
        seen.append((losses, added))
        optimizer.step()
    return seen


class Planned(NamedTuple):
    """Of one planned step on one rank: what training saw, and its bytes; of one that was refused before it, why."""

    losses: list[float]
    gradients: Gradients
    peak_bytes: int = 0
    certified_bytes: int = 0
    programs: tuple[str, ...] = ()  # of all ranks
    refused: str = ""
    evaluated: Sequence[float] = ()  # losses of `EVALUATED` after the step
    norm: float | None = None  # of the gradients of the step before


@contextmanager
def planning(
    budget: int,
    placement: Sequence[int] = (0, 1),
    modules: dict[int, nn.Module] | None = None,
    costs: CostModel | None = None,
    **options: Any,
) -> Iterator[tuple[PlannedSteps, dict[int, nn.Module]]]:
    """Planned steps of a pipeline of four micro-batches, and this rank's stages; times are measured once."""
    modules = modules or own_stages(placement)
    with (
        patch.object(planned_steps, "REPEATS", 1),
        Pipeline(modules, placement, loss_fn, 4, **options) as pipe,
        PlannedSteps(pipe, activation_budget_bytes=budget, costs=costs) as train,
    ):
        yield train, modules


def planned(
    placement: Sequence[int], taken: Sequence[Turn], budget: int, how: str = "alone", max_norm: float = 0.0
) -> list[Planned]:
    """Trains with a schedule for every step; with `how` in replicas, of which each takes every other turn. With a
    `max_norm`, gradients are clipped by post-validation."""
    here = place(alone=how == "alone")
    number, turns, seen = here.number, taken[here.replica :: here.replicas], []
    with planning(budget, placement, here.stages(placement, how), group=here.group) as (train, modules):
        pipe, optimizer = train._pipe, sgd(*modules.values())
        batches = [given(turn, seed, list(modules), number, len(placement)) for seed, turn in enumerate(turns)]
        if max_norm:
            pipe.post_validate(optimizer, max_norm)
        steps = train.ahead([(each["inputs"], each["targets"]) for each in batches])
        for (inputs, targets), each in zip(steps, batches, strict=True):
            optimizer.zero_grad()
            try:
                report = train.step(inputs, targets, weights=each["weights"], trace=True)
            except StepMemoryError as error:
                seen.append(Planned([], {}, refused=str(error)))
                continue
            schedule = train.schedule
            seen.append(
                Planned(
                    report.losses or [],
                    gradients(modules),
                    report.peak_activation_bytes,
                    schedule.compiled.certificate.device[number].bytes,
                    tuple(" ".join(map(str, program.ops())) for program in schedule.programs),
                    norm=report.grad_norm,
                )
            )
            optimizer.step()
            for module in modules.values():
                module.eval()
            evaluated = given(EVALUATED, 99, list(modules), number, len(placement))
            seen[-1] = seen[-1]._replace(evaluated=pipe.evaluate(**evaluated).losses or [])
            for module in modules.values():
                module.train()
    return seen


def given_here(turn: Turn, seed: int) -> dict[str, Any]:
    return given(turn, seed, [dist.get_rank()], dist.get_rank(), 2)
