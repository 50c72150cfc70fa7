"""What the ranks run in `test_training`: clipping, optimizers, scaled losses, autocast, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import (
    WIDTH,
    WORDS,
    Gradients,
    batch,
    batches,
    loss_fn,
    make_stages,
    own_stages,
    plain_step,
    plain_training,
)
from support.ranks.replicas import Seen, gradients, mesh, parameters, wrapped


def plain(
    stages: int,
    microbatches: int,
    steps: int,
    replica: int | None = None,
    max_norm: float = math.inf,
    norm_type: float = 2.0,
) -> tuple[list[list[float]], list[Gradients], list[float]]:
    """The same in one process: over the whole batch, or a replica's half of it. Losses, gradients, and the norms that
    clipping saw."""
    data = batches(steps, microbatches if replica is None else 2 * microbatches)
    if replica is not None:
        data = [(inputs.chunk(2)[replica], targets.chunk(2)[replica]) for inputs, targets in data]
    trained = plain_training(make_stages(stages), data, microbatches, max_norm=max_norm, norm_type=norm_type)
    return [step.losses for step in trained], [step.clipped for step in trained], [step.norm for step in trained]


def clipped(schedules: Sequence[Schedule], max_norm: float, norm_type: float) -> list[Seen]:
    """A step with each schedule on two ranks."""
    rank, m = dist.get_rank(), schedules[0].problem.microbatches
    modules = own_stages([0, 1])
    optimizer, seen = torch.optim.SGD(modules[rank].parameters(), lr=0.1), []
    with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
        for step, schedule in enumerate(schedules):
            pipe.load(schedule)
            optimizer.zero_grad()
            report = pipe.step(*batch(step, m))
            norm = pipe.clip_grad_norm_(max_norm, norm_type)
            seen.append(Seen(report.losses, gradients(modules), norm))
            optimizer.step()
    return seen


def autocast(schedule: Schedule, states: Sequence[bool]) -> tuple[list[list[float] | None], Gradients]:
    """A step with autocast or without, one after the other, gradients added up, in which what passes between stages has
    another type."""
    m, rank = schedule.problem.microbatches, dist.get_rank()
    modules, losses = {rank: perceptrons()[rank]}, []
    with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
        pipe.load(schedule)
        for step, enabled in enumerate(states):
            with torch.autocast("cpu", torch.bfloat16, enabled):
                losses += [pipe.step(*batch(step, m)).losses, pipe.evaluate(*batch(step, m)).losses]
    return losses, gradients(modules)


def plain_autocast(microbatches: int, states: Sequence[bool]) -> tuple[list[list[float]], Gradients]:
    torch.set_num_threads(1)
    modules = dict(enumerate(perceptrons()))
    losses: list[list[float]] = []
    for step, enabled in enumerate(states):
        losses.append([])
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled):
                loss = loss_fn(modules[1](modules[0](x)), y)
            torch.autograd.backward(loss / microbatches)
            losses[-1].append(loss.item())
        losses.append(losses[-1])
    return losses, gradients(modules)


def perceptrons() -> list[nn.Module]:
    torch.manual_seed(2)
    return [
        nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WORDS)),
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda own: torch.optim.AdamW(own, lr=1e-2, fused=True),
    "adamw foreach": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=True),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda own: torch.optim.Adafactor(own, lr=1e-2),
}


class Habits(NamedTuple):
    """How somebody trains: every `accumulate` steps the optimizer, then the scheduler; gradients are set to None or to
    zero."""

    optimizer: str
    accumulate: int = 1
    to_none: bool = True


def optimized(habits: Habits, modules: dict[int, nn.Module], steps: int, run: Callable[[int], Any]) -> Gradients:
    """Trains by `run(step)` and returns the parameters."""
    optimizer = OPTIMIZERS[habits.optimizer]([p for module in modules.values() for p in module.parameters()])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(steps):
        run(step)
        if (step + 1) % habits.accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=habits.to_none)
    return parameters(modules)


def habitual(schedule: Schedule, all_habits: Sequence[Habits], steps: int) -> list[Gradients]:
    m = schedule.problem.microbatches
    found = []
    for habits in all_habits:
        modules = own_stages([0, 1])
        with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
            pipe.load(schedule)
            found.append(optimized(habits, modules, steps, lambda step: pipe.step(*batch(step, m))))
    return found


def plainly(habits: Habits, microbatches: int, steps: int) -> Gradients:
    torch.set_num_threads(1)
    modules = dict(enumerate(make_stages(2)))
    return optimized(
        habits,
        modules,
        steps,
        lambda step: plain_step(modules.values(), *batch(step, microbatches), microbatches),
    )


def scaled(schedule: Schedule, overflow: int) -> tuple[list[float], list[list[float] | None], Gradients]:
    """Four steps with a loss scale that overflows once, on rank 1 only: the scales, the losses, the parameters."""
    m, rank = schedule.problem.microbatches, dist.get_rank()
    modules = own_stages([0, 1])
    optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**16, process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))  # the scale is made at its first use, and only the last rank computes a loss
    scales, losses = [], []
    with Pipeline(modules, [0, 1], lambda output, target: scaler.scale(loss_fn(output, target)), m) as pipe:
        pipe.load(schedule)
        for step in range(4):
            optimizer.zero_grad()
            report = pipe.step(*batch(step, m))
            if step == overflow and rank == 1:
                next(modules[1].parameters()).grad[0] = torch.inf  # type: ignore[index]
            losses.append(report.losses and [loss / scaler.get_scale() for loss in report.losses])
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales, losses, parameters(modules)


def checkpointed(
    schedule: Schedule, folder: str, steps: range, resume: bool, save: bool, how: str = "alone", dropout: float = 0.0
) -> tuple[list[Any], Gradients]:
    """Trains some steps of a training, from the checkpoint or from the start; losses, and the parameters at the end."""
    placement = [stage.device for stage in schedule.problem.stages]
    group = mesh()["pipe"].get_group() if how != "alone" else None
    number, m = dist.get_rank(group), schedule.problem.microbatches
    modules = {
        s: wrapped(module, how)
        for s, module in enumerate(make_stages(len(placement), dropout))
        if placement[s] == number
    }
    model = nn.ModuleDict({str(s): module for s, module in modules.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    losses = []
    if resume:
        for module in modules.values():
            nn.init.zeros_(next(module.parameters()))  # all comes from the checkpoint

    def states() -> dict[str, Any]:
        own, its = get_state_dict(model, optimizer, options=by_name)
        random = {f"random.{number}": torch.get_rng_state()} if dropout else {}
        return {"model": own, "optimizer": its, "scheduler": scheduler.state_dict(), **random}

    with Pipeline(modules, placement, loss_fn, m, group=group) as pipe:
        pipe.load(schedule)
        if resume:
            state = states()
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=by_name
            )
            scheduler.load_state_dict(state["scheduler"])
            if dropout:
                torch.set_rng_state(state[f"random.{number}"])
        for step in steps:
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step, m)).losses)
            optimizer.step()
            scheduler.step()
        if save:
            dcp.save(states(), checkpoint_id=folder)
    return losses, parameters(modules)
