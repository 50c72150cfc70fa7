"""A model that is profiled layer by layer takes the placement that was found, also in the middle of a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import problems
from support.ranks import layered, models
from support.ranks.worker import Ranks

from optpipe.errors import InputError
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import as_whole, stages_of


def test_a_training_goes_on_in_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    """Losses are to the bit those of a plain run, before and after."""
    layers = [1, 2, 1, 1]
    (problem, first, names), (same, last, others) = ranks(layered.moved, folder=str(tmp_path), layers=layers)
    assert same == problem
    losses = layered.plain()
    assert [a or b for a, b in zip(first, last, strict=True)] == losses
    assert [bool(step) for step in first] == [False, False, True, True], "the last stage is on rank 0 after the change"
    everything = set(models.model("layers").state_dict())
    for here, there in zip(names, others, strict=True):
        assert {*here, *there} == everything
        assert not {*here} & {*there}
    assert names[0] != names[1]


def test_layers_are_measured_and_stages_are_made_of_them(ranks: Ranks) -> None:
    problem, _ = ranks(layered.profiled)
    assert problem.layers is not None
    assert len(problem.layers) == models.model_layers()
    assert all(layer.forward_ms > 0 for layer in problem.layers)
    even = Placement.balanced(problem, 1)
    assert even.apply(problem) == problem
    assert [stage.device for stage in problem.stages] == [0, 1]
    assert Problem.from_dict(problem.to_dict()) == problem
    assert Placement.balanced(problem, 2, "v").layers is not None, "a search has something to choose"


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
    schedule = layered.placed(problem, Placement.from_dict(placement) if placement else None)
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


def test_names_in_the_whole_are_those_of_the_model() -> None:
    whole = models.CausalLM(tied=True)
    for layers in ([5], [2, 3], [1, 1, 1, 1, 1]):
        stages = stages_of(whole, [0] * len(layers), layers, rank=0)
        module = as_whole(stages)
        assert {**dict(module.named_parameters())} == {**dict(whole.named_parameters())}
