"""A model that is profiled layer by layer takes the placement that was found, also in the middle of a training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import problems
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, fake_service
from support.problems.chain import gpipe
from support.ranks import models
from support.ranks.cases import plain_training
from support.ranks.models import MICROBATCHES
from support.ranks.swaps import heard
from support.ranks.worker import Ranks
from support.until import until
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from optpipe.errors import InputError
from optpipe.model.placement import Placement, rechunk
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Follower, Pipeline, as_whole, on_all_ranks, profile_layers, stages_of
from optpipe_runtime.follow import one_at_a_time
from optpipe_runtime.other_stages import OtherStages
from optpipe_runtime.service.client import ClientOptions

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


def searching(asked: Asked) -> Answer:
    """A service whose search of all placements finds `pipelined`, and whose other one finds nothing."""
    if asked.path == "/v1/jobs":
        posed.append(Problem.from_dict(asked.json()["problem"]))
        return fake.job(asked.json()["placements"])
    if asked.path.endswith("/incumbents/1"):
        return fake.incumbent(pipelined(next(problem for problem in posed if problem.layers)))
    return fake.events(*[fake.one()] * ("/jobs/all/" in asked.path), fake.end())


posed: list[Problem] = []


def test_a_training_goes_on_in_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    """A follower keeps and tells what the service finds, and does not swap it in. Losses are to the bit those of a
    plain run, before and after."""
    posed.clear()
    with fake_service(searching) as (url, _):
        first, second = ranks(moved, folder=str(tmp_path), url=url)
    (problem, better, first_losses, names, (version, logged)), (same, also, last_losses, others, (_, quiet)) = (
        first,
        second,
    )
    assert (same, also) == (problem, better)
    assert better.placement == pipelined(problem).placement
    assert version == 2, "what was loaded, before and after the profile, and nothing from the service"
    [told] = [line for line in logged if "other stages" in line]
    assert told.startswith("a schedule for other stages (2 chunks a device, V-shaped, layers 1 2 1 1) takes ")
    assert told.endswith(": it is kept for the next start from a checkpoint")
    assert not [line for line in quiet if "other stages" in line]
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


def test_a_better_schedule_for_the_same_stages_does_not_hide_one_for_others() -> None:
    """Both come before the next poll."""
    problem = with_layers(5, 2)
    others, same = placed(problem, PLACEMENT), gpipe(problem)
    running = one_at_a_time(problem)
    assert running.makespan_ms > others.makespan_ms > same.makespan_ms
    answers = {
        "/jobs": fake.job(),
        "/events": fake.events(fake.one(1), fake.one(2), fake.end()),
        "/incumbents/1": fake.incumbent(others, 1),
        "/incumbents/2": fake.incumbent(same, 2),
    }
    with fake_service(fake.by_path(answers)) as (url, asked):
        search = OtherStages(url, running, None, None, ClientOptions(placements="all"))
        until(lambda: search._client.ended)
        search.poll()
        search.close()
    assert any(request.path.endswith("/incumbents/2") for request in asked)
    assert search.best.programs == others.programs
    assert search.best.placement == PLACEMENT


def test_a_follower_needs_layers_to_look_for_other_stages() -> None:
    pipe: Any = SimpleNamespace(schedule=None)
    with pytest.raises(
        InputError, match=r"^placements = 'all': the problem has no layers; before the first step, load"
    ):
        Follower(pipe, "http://127.0.0.1:1", placements="all").step()


def with_layers(count: int, devices: int) -> Problem:
    layer = problems.stage((1, 1, 1), (10, 10))
    stages = [{"device": d, **layer} for d in range(devices)]
    problem = Problem.from_dict(
        {
            "microbatches": models.MICROBATCHES,
            "p2p_ms": 0.0,
            "devices": [{"activation_budget_bytes": 1000}] * devices,
            "stages": stages,
        }
    )
    return Placement.balanced(problem.replace(layers=[layer] * count), 1).apply(problem.replace(layers=[layer] * count))


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
