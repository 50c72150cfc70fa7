"""What the ranks run in `test_training`: optimizers, clipping, scaled losses, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    Gradients,
    batch,
    loss_fn,
    make_stages,
    own_stages,
    pipeline,
    plain_step,
)
from support.ranks.replicas import Seen, gradients, parameters, place


class Habits(NamedTuple):
    """How somebody trains: every `accumulate` steps the optimizer, then the scheduler; gradients are set to None or to
    zero."""

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    accumulate: int = 1
    to_none: bool = True


HABITS = (
    Habits(lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1, fused=True), accumulate=2),
    Habits(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True), accumulate=2, to_none=False),
    Habits(lambda own: torch.optim.Adafactor(own, lr=1e-2)),
)


def optimized(schedule: Schedule, steps: int) -> list[Gradients]:
    """The parameters after a training with each of the habits."""
    trained = []
    for habits in HABITS:
        modules = own_stages([0, 1])
        with pipeline(modules, schedule) as pipe:
            trained.append(_optimize(habits, modules, steps, schedule.problem.microbatches, pipe.step))
    return trained


def optimized_plainly(microbatches: int, steps: int) -> list[Gradients]:
    """The same in one process, with one thread as on a rank: more of them add in another order."""
    torch.set_num_threads(1)
    trained = []
    for habits in HABITS:
        modules = dict(enumerate(make_stages(2)))
        step = partial(plain_step, modules.values(), microbatches=microbatches)
        trained.append(_optimize(habits, modules, steps, microbatches, step))
    return trained


def _optimize(
    habits: Habits, modules: dict[int, nn.Module], steps: int, microbatches: int, run: Callable[..., object]
) -> Gradients:
    optimizer = habits.optimizer([parameter for module in modules.values() for parameter in module.parameters()])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(steps):
        run(*batch(step, microbatches))
        if (step + 1) % habits.accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=habits.to_none)
    return parameters(modules)


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
    here, m = place(alone=how == "alone"), schedule.problem.microbatches
    modules = here.stages(placement, how, dropout)
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
        random = {f"random.{here.number}": torch.get_rng_state()} if dropout else {}
        return {"model": own, "optimizer": its, "scheduler": scheduler.state_dict(), **random}

    with pipeline(modules, schedule, group=here.group) as pipe:
        if resume:
            state = states()
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=by_name
            )
            scheduler.load_state_dict(state["scheduler"])
            if dropout:
                torch.set_rng_state(state[f"random.{here.number}"])
        for step in steps:
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step, m)).losses)
            optimizer.step()
            scheduler.step()
        if save:
            dcp.save(states(), checkpoint_id=folder)
    return losses, parameters(modules)
