"""A model that is profiled layer by layer, and trains on in other stages from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, as_whole, on_all_ranks, profile_layers, stages_of
from support.ranks import models
from support.ranks.models import MICROBATCHES

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 2  # before and after the change


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets, _ = models.data("layers")
    return inputs.roll(step, 1), targets.roll(step, 1)


def profiled() -> Problem:
    return profile_layers(
        models.model("layers"), models.loss_fn, MICROBATCHES, *batch(0), activation_budget_bytes=10**6, repeats=1
    )


def placed(problem: Problem, placement: Placement | None) -> Schedule:
    made = placement.apply(problem) if placement else problem
    return Schedule.parse(made, models.in_turn([s.device for s in made.stages], "kept"), placement=placement)


def moved(folder: str, layers: list[int]) -> tuple[Problem, list[list[float]], list[tuple[str, ...]]]:
    """Trains in the given stages, saves, and trains on in other stages: the problem, the losses of every step, and the
    names that were saved each time."""
    problem = profiled()
    other = Placement.from_dict({"chunks": 2, "shape": "v", "layers": layers})
    losses: list[list[float]] = []
    names: list[tuple[str, ...]] = []
    for part, placement in enumerate((None, other)):
        schedule = on_all_ranks(placed(problem, placement) if dist.get_rank() == 0 else None)
        whole = models.model("layers")
        if part:  # what is not loaded would show
            for parameter in whole.parameters():
                nn.init.zeros_(parameter)
        stages = stages_of(whole, schedule)
        module = as_whole(stages)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        if part:
            saved = state(module, optimizer)
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(
                module,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
                options=BY_NAME,
            )
        with Pipeline(stages, [s.device for s in schedule.problem.stages], models.loss_fn, MICROBATCHES) as pipe:
            pipe.load(schedule)
            for step in range(part * STEPS, (part + 1) * STEPS):
                optimizer.zero_grad()
                losses.append(pipe.step(*batch(step)).losses or [])
                optimizer.step()
        if not part:
            dcp.save(state(module, optimizer), checkpoint_id=folder)
        names.append(tuple(module.state_dict()))
    return problem, losses, names


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(module, optimizer, options=BY_NAME)
    return {"model": parameters, "optimizer": moments}


def plain() -> list[list[float]]:
    whole = models.model("layers")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        losses.append([])
        inputs, targets = batch(step)
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = models.loss_fn(whole(x), y)
            torch.autograd.backward(loss / MICROBATCHES)
            losses[-1].append(loss.item())
        optimizer.step()
    return losses
