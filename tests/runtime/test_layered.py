"""A model that is profiled layer by layer takes the placement that was found, also in the middle of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import problems
from support.ranks import models
from support.ranks.cases import plain_training
from support.ranks.models import MICROBATCHES
from support.ranks.worker import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from optpipe.errors import InputError
from optpipe.model.placement import Placement, rechunk
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, as_whole, on_all_ranks, profile_layers, stages_of

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


def moved(folder: str) -> tuple[Problem, Schedule, list[list[float]], list[tuple[str, ...]]]:
    """Trains in stages that are even, saves, and trains on in those of another schedule: the problem, that schedule,
    the losses of every step, and the names that were saved each time."""
    measured = profiled()
    assert len(measured.layers or ()) == models.model_layers()
    assert all(layer.forward_ms > 0 for layer in measured.layers or ())
    assert Problem.from_dict(measured.to_dict()) == measured
    problem = steady(measured)
    losses: list[list[float]] = []
    names: list[tuple[str, ...]] = []
    for place, found in enumerate((placed(problem, None), pipelined(problem))):
        schedule = on_all_ranks(found if dist.get_rank() == 0 else None)
        stages, module, optimizer = made(schedule)
        if place:
            for parameter in module.parameters():  # what is not loaded would show
                nn.init.zeros_(parameter)
            saved = state(module, optimizer)
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(
                module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=BY_NAME
            )
        with Pipeline(stages, devices(schedule), models.loss_fn, MICROBATCHES) as pipe:
            pipe.load(schedule)
            for step in range(STEPS * place, STEPS * (place + 1)):
                optimizer.zero_grad()
                losses.append(pipe.step(*batch(step)).losses or [])
                optimizer.step()
        names.append(tuple(module.state_dict()))
        if not place:
            dcp.save(state(module, optimizer), checkpoint_id=folder)
    return problem, schedule, losses, names


def made(schedule: Schedule) -> tuple[dict[int, nn.Module], nn.Module, torch.optim.Optimizer]:
    stages: Any = stages_of(models.model("layers"), schedule)
    module = as_whole(stages)
    return stages, module, torch.optim.AdamW(module.parameters(), lr=0.01)


def devices(schedule: Schedule) -> list[int]:
    return [stage.device for stage in schedule.problem.stages]


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(module, optimizer, options=BY_NAME)
    return {"model": parameters, "optimizer": moments}


PLACEMENT = Placement.from_dict({"chunks": 2, "shape": "v", "layers": [1, 2, 1, 1]})


def pipelined(problem: Problem) -> Schedule:
    """In stages 0 and 3 on one device, 1 and 2 on the other; shorter than micro-batch by micro-batch."""
    microbatches = range(3)
    lists = [
        [f"0F{j}" for j in microbatches]
        + [f"3{kind}{j}" for j in microbatches for kind in "FBW"]
        + [f"0{kind}{j}" for j in microbatches for kind in "BW"],
        [f"{s}F{j}" for j in microbatches for s in (1, 2)]
        + [f"{s}{kind}{j}" for j in microbatches for s in (2, 1) for kind in "BW"],
    ]
    return Schedule.parse(PLACEMENT.apply(problem), lists, placement=PLACEMENT)


def test_a_training_goes_on_in_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    """Losses are to the bit those of a plain run, before and after."""
    (problem, better, first_losses, names), (same, also, last_losses, others) = ranks(moved, folder=str(tmp_path))
    assert (same, also) == (problem, better)
    assert better.placement == PLACEMENT
    whole = models.model("layers")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    data, loss = map(batch, range(2 * STEPS)), models.loss_fn
    losses = [step.losses for step in plain_training([whole], data, MICROBATCHES, optimizer, loss)]
    assert [a or b for a, b in zip(first_losses, last_losses, strict=True)] == losses
    assert [bool(step) for step in first_losses] == [False, False, True, True], "the last stage is on rank 0 afterwards"
    everything = set(models.model("layers").state_dict())
    for here, there in zip(names, others, strict=True):
        assert {*here, *there} == everything
        assert not {*here} & {*there}
    assert names[0] != names[1]


def with_layers(count: int, devices: int) -> Problem:
    layer = problems.stage((1, 1, 1), (10, 10))
    problem = problems.pipeline(devices, MICROBATCHES, 1000, layer, layers=[layer] * count)
    return Placement.balanced(problem, 1).apply(problem)


@pytest.mark.parametrize(
    ("placement", "counts"), [(None, [3, 2]), ({"chunks": 2, "layers": [1, 1, 2, 1]}, [1, 1, 2, 1])]
)
def test_stages_are_those_of_a_schedule(placement: dict[str, object] | None, counts: list[int]) -> None:
    problem = with_layers(5, 2)
    schedule = placed(problem, Placement.from_dict(placement) if placement else None)
    found = {
        s: stage for rank in range(2) for s, stage in stages_of(models.model("layers"), schedule, rank=rank).items()
    }
    assert sorted(counts) == sorted(len(list(found[s].children())) for s in range(len(counts)))
    if placement:
        assert [len(list(found[s].children())) for s in range(len(counts))] == counts


def test_a_schedule_whose_stages_are_others_is_refused() -> None:
    problem = with_layers(5, 2)
    slower = [stage.model_dump(exclude_none=True) | {"forward_ms": 9.0} for stage in problem.stages]
    schedule = Schedule.parse(problem.replace(stages=slower), models.in_turn([0, 1], "kept"))
    with pytest.raises(
        InputError, match=r"^placement is a schedule whose stages are not those of its problem's layers"
    ):
        stages_of(models.model("layers"), schedule, rank=0)
    assert len(stages_of(models.model("layers"), schedule, [4, 1], rank=0)) == 1
