"""What the ranks run in `test_microbatches`: steps and evaluations with micro-batches of different shapes, and the
plain run that they must equal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepMemoryError, StepRules, StepScheduler, assign, pack
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps, StepReport
from optpipe_runtime.execute import learner
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.steps.planned import tokens_and_squares
from support.ranks.cases import WORDS, Gradients, loss_fn, make_stages, numbers, sgd
from support.ranks.device import device
from support.ranks.replicas import gradients, place
from support.ranks.swaps import failing, heard
from support.service.following import until


class Sizes(NamedTuple):
    """Of one micro-batch."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class Turn(NamedTuple):
    """A step or an evaluation."""

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


class Seen(NamedTuple):
    """After a turn; `learned` is how many stages were learned in it."""

    losses: list[float]
    loss: float | None
    gradients: Gradients
    learned: int = 0


def batch(turn: Turn, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(WORDS, (rows, length + 1), generator=generator).to(device()) for rows, length in turn.sizes]
    return [each[:, :-1].contiguous() for each in tokens], [each[:, 1:].contiguous() for each in tokens]


def factors(turn: Turn, total: float | None = None) -> list[float]:
    """By what the gradient of each loss is multiplied, before they are divided by their number."""
    if turn.weights is None:
        return [1.0] * len(turn.sizes)
    return [weight * len(turn.sizes) / (total or sum(turn.weights)) for weight in turn.weights]


def plain_turn(modules: Sequence[nn.Module], turn: Turn, seed: int, total: float | None = None) -> list[float]:
    """Plain autograd, one micro-batch after the other."""
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


def plain(stages: int, turns: Sequence[Turn], max_norm: float = 0.0) -> list[Expected]:
    torch.set_num_threads(1)
    modules = make_stages(stages)
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


def turns(schedule: Schedule, taken: Sequence[Turn]) -> list[Seen]:
    """By one schedule for each number of micro-batches."""
    placement = [stage.device for stage in schedule.problem.stages]
    number, seen = dist.get_rank(), []
    modules = {s: module for s, module in enumerate(make_stages(len(placement))) if placement[s] == number}
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
            seen.append(Seen(report.losses or [], report.loss, numbers(modules), learn.call_count))
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


def planned(
    placement: Sequence[int],
    taken: Sequence[Turn],
    budget: int,
    host_memory_bytes: int | None = None,
    how: str = "alone",
    max_norm: float = 0.0,
) -> list[Planned]:
    """Trains with a schedule for every step; with `how` in replicas, of which each takes every other turn. With a
    `max_norm`, gradients are clipped by post-validation."""
    here = place() if how != "alone" else None
    number = here.number if here else dist.get_rank()
    turns = list(taken[here.replica :: 2]) if here else list(taken)
    modules = (
        here.stages(placement, how)
        if here
        else {s: module for s, module in enumerate(make_stages(len(placement))) if placement[s] == number}
    )
    optimizer, seen = sgd(*modules.values()), []
    batches = [given(turn, seed, list(modules), number, len(placement)) for seed, turn in enumerate(turns)]
    with (
        Pipeline(
            modules, placement, loss_fn, 4, group=here and here.group, host_memory_bytes=host_memory_bytes
        ) as pipe,
        PlannedSteps(pipe, activation_budget_bytes=budget) as train,
    ):
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


@contextmanager
def planning(
    budget: int, url: str | None = None, **options: Any
) -> Iterator[tuple[PlannedSteps, dict[int, nn.Module]]]:
    """Planned steps of two stages on two ranks, of four micro-batches each, and this rank's stage."""
    number = dist.get_rank()
    modules: dict[int, nn.Module] = {number: make_stages(2)[number]}
    with (
        Pipeline(modules, [0, 1], loss_fn, 4, **options) as pipe,
        PlannedSteps(pipe, activation_budget_bytes=budget, url=url) as train,
    ):
        yield train, modules


def given_here(turn: Turn, seed: int) -> dict[str, Any]:
    return given(turn, seed, [dist.get_rank()], dist.get_rank(), 2)


class Streamed(NamedTuple):
    """Of a training whose service keeps its rules: its losses, and on the rank that plans from how many other rules the
    search for each step started, and the first ones that the service had."""

    losses: list[list[float]]
    starts: list[int]
    rules: StepRules | None


def streamed(taken: Sequence[Turn], budget: int, url: str) -> Streamed:
    """Planned steps on two ranks; after the first one they wait until the service has answered."""
    losses, rules = [], None
    with (
        planning(budget, url) as (train, modules),
        patch.object(StepScheduler, "plan", autospec=True, side_effect=StepScheduler.plan) as plan,
    ):
        optimizer = sgd(*modules.values())
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            losses.append(train.step(**given_here(turn, seed)).losses or [])
            optimizer.step()
            if train._planner and (stream := train._planner.stream):
                until(lambda stream=stream: stream._stream)
                rules = rules or stream.rules
        starts = [len(call.kwargs["starts"]) for call in plan.call_args_list]
    return Streamed(losses, starts, rules)


class Spread(NamedTuple):
    """Of the rank with the first stage: the problem of a step, before and after it, and how it is spread; of the other
    one, why it cannot tell."""

    planned: Problem | None = None
    problem: Problem | None = None
    assigned: Sequence[Sequence[int]] = ()
    packed: Sequence[Sequence[int]] = ()
    refused: str = ""


def spread(turn: Turn, budget: int) -> Spread:
    """A planned step; then its micro-batches, or each of them as a document, on two replicas."""
    each = [{"squares": size.tokens * size.length, "tokens": size.tokens} for size in turn.sizes]  # in another order
    with planning(budget) as (train, _):
        train.step(**given_here(turn, 0))
        try:
            problem = train.problem(each)
        except InputError as error:
            return Spread(refused=str(error))
        packing = pack(each, 2, {"tokens": 64}, train.problem, train.costs, 2)
        return Spread(train.schedule.problem, problem, assign(problem, 2).microbatches, packing.documents)


class Scarce(NamedTuple):
    """What came of a step by which rank 1 ran out of memory: the losses, what was said, and how the last one ran."""

    losses: list[float]
    gradients: Gradients
    told: str
    logged: list[str]
    programs: tuple[str, ...]


def scarce(turn: Turn, budget: int, times: int) -> Scarce:
    """Planned steps on two ranks, of which one runs out of memory so many times; then once more, if it was refused."""
    told, left, real = "", [times if dist.get_rank() == 1 else 0], Executor.run

    def run(*arguments: Any, **options: Any) -> StepReport:
        left[0] -= 1
        with failing("forward", 2, torch.OutOfMemoryError("too much")) if left[0] >= 0 else nullcontext():
            return real(*arguments, **options)

    with planning(budget) as (train, modules), patch.object(Executor, "run", run), heard() as logged:
        try:
            report = train.step(**given_here(turn, 0))
        except OptPipeError as error:
            told = str(error)
            assert not numbers(modules), "it is undone"
            report = train.step(**given_here(turn, 0))
        programs = tuple(" ".join(map(str, program.ops())) for program in train.schedule.programs)
        return Scarce(report.losses or [], numbers(modules), told, list(logged), programs)


def hosted(taken: Sequence[Turn], budget: int) -> list[list[float]]:
    """Losses of planned steps on two ranks, whose last stage has its optimizer on the host."""
    hosts = {1: lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1)}
    with planning(budget, host_optimizers=hosts) as (train, modules):
        on_device, losses = sgd(*(module for s, module in modules.items() if s == 0)), []
        for seed, turn in enumerate(taken):
            on_device.zero_grad()
            losses.append(train.step(**given_here(turn, seed)).losses or [])
            on_device.step()
    return losses


def uneven(planned: bool) -> str:
    """What a rank is told whose loader has a batch more than that of rank 1, which has gone."""
    batches = [given_here(FIRST, seed) for seed in range(4 - dist.get_rank())]
    try:
        with planning(10**6) as (train, _):
            if planned:
                for inputs, targets in train.ahead([(each["inputs"], each["targets"]) for each in batches]):
                    train.step(inputs, targets)
            else:
                pipe = train._pipe
                pipe.load(one_at_a_time(pipe.layout.unmeasured()))
                for each in batches:
                    pipe.step(**each)
    except OptPipeError as error:
        return str(error)
    os._exit(0)


def misused() -> list[str]:
    """Planned steps on two ranks, wrongly used: what each rank is told."""
    number, told = dist.get_rank(), []
    turns = [Turn((Sizes(1, 4), Sizes(2, 7))), Turn((Sizes(1, 5), Sizes(2, 9))), Turn((Sizes(1, 6), Sizes(1, 4)))]
    batches = [[Microbatches(part) for part in batch(turn, seed)] for seed, turn in enumerate(turns)]

    def train(announced: Sequence[int], run: Sequence[int], stages: int = 2, features: Any = None) -> None:
        costs = CostModel(("tokens", "squares"), stages) if number == 0 else None
        modules = {number: make_stages(2)[number]}
        given = features or tokens_and_squares
        with (
            Pipeline(modules, [0, 1], loss_fn, 2) as pipe,
            PlannedSteps(pipe, given, activation_budget_bytes=10**6, costs=costs) as steps,
        ):
            for k in announced:
                steps.announce(*batches[k])
            for k in run:
                steps.step(*batches[k])

    for wrong in (
        lambda: train([0, 1], [0, 2]),
        lambda: train([0, 1][: number + 1], [0, 1]),
        lambda: train([0], [0], stages=3),
        lambda: train([0], [0], features=lambda tokens: {"tokens": float("nan")}),
    ):
        with pytest.raises(OptPipeError) as caught:
            wrong()
        told.append(str(caught.value))
    return told
