"""A model that is profiled layer by layer, and trains on in other stages from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from optpipe.model.placement import Placement, rechunk
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Follower, Pipeline, as_whole, on_all_ranks, profile_layers, stages_of
from support.following import until
from support.ranks import models
from support.ranks.cases import plain_step
from support.ranks.models import MICROBATCHES
from support.ranks.swaps import heard

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 2  # before and after the change


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets, _ = models.data("layers")
    return inputs.roll(step, 1), targets.roll(step, 1)


def profiled() -> Problem:
    return profile_layers(
        models.model("layers"), models.loss_fn, MICROBATCHES, *batch(0), activation_budget_bytes=10**6, repeats=1
    )


def steady(problem: Problem) -> Problem:
    """With given times: measured ones may be such that no other stages are better."""
    ms = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
    layers = [layer.model_copy(update=ms) for layer in problem.layers or ()]
    return rechunk(problem.replace(layers=layers, p2p_ms=0.1), 1)


def placed(problem: Problem, placement: Placement | None) -> Schedule:
    made = placement.apply(problem) if placement else problem
    return Schedule.parse(made, models.in_turn([s.device for s in made.stages], "kept"), placement=placement)


def moved(
    folder: str, url: str
) -> tuple[Problem, Schedule, list[list[float]], list[tuple[str, ...]], tuple[int, list[str]]]:
    """Trains in stages that are even, saves, and trains on in those that the service has found meanwhile: the problem,
    what was found, the losses of every step, the names that were saved each time, and, before the change, the version
    of the schedule and the log."""
    measured = profiled()
    assert len(measured.layers or ()) == models.model_layers()
    assert all(layer.forward_ms > 0 for layer in measured.layers or ())
    assert Problem.from_dict(measured.to_dict()) == measured
    problem = steady(measured)
    losses: list[list[float]] = []
    names: list[tuple[str, ...]] = []
    schedule = on_all_ranks(placed(problem, None) if dist.get_rank() == 0 else None)
    stages, module, optimizer = made(schedule)
    with (
        heard("optpipe.follow") as logged,
        Pipeline(stages, devices(schedule), models.loss_fn, MICROBATCHES) as pipe,
        Follower(pipe, url, activation_budget_bytes=10**6, placements="all") as follow,
    ):
        pipe.load(schedule)
        assert on_all_ranks(follow.for_next_start or schedule) == schedule, "nothing has been found yet"
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(follow.step(*batch(step)).losses or [])
            optimizer.step()
            if step == 0 and (others := follow._other_stages):
                until(lambda: others.best or others._client._newest)  # the next step polls it
        before = pipe.version, list(logged)
        better = on_all_ranks(follow.for_next_start or schedule)
    dcp.save(state(module, optimizer), checkpoint_id=folder)
    names.append(tuple(module.state_dict()))

    stages, module, optimizer = made(better)
    for parameter in module.parameters():  # what is not loaded would show
        nn.init.zeros_(parameter)
    saved = state(module, optimizer)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=BY_NAME
    )
    with Pipeline(stages, devices(better), models.loss_fn, MICROBATCHES) as pipe:
        pipe.load(better)
        for step in range(STEPS, 2 * STEPS):
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step)).losses or [])
            optimizer.step()
    names.append(tuple(module.state_dict()))
    return problem, better, losses, names, before


def made(schedule: Schedule) -> tuple[dict[int, nn.Module], nn.Module, torch.optim.Optimizer]:
    """The stages of a schedule, together, and their optimizer."""
    stages: Any = stages_of(models.model("layers"), schedule)
    module = as_whole(stages)
    return stages, module, torch.optim.AdamW(module.parameters(), lr=0.01)


def devices(schedule: Schedule) -> list[int]:
    return [stage.device for stage in schedule.problem.stages]


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(module, optimizer, options=BY_NAME)
    return {"model": parameters, "optimizer": moments}


def plain() -> list[list[float]]:
    whole = models.model("layers")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        losses.append(plain_step([whole], *batch(step), MICROBATCHES, models.loss_fn))
        optimizer.step()
    return losses
