"""A training script around a pipeline compared with the same training in one process; docs/training.md, whose script
runs; and a model that is profiled layer by layer, which takes the placement that was found, also in mid training."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import problems
from support.close import require_close
from support.ranks import cases, models, scripts
from support.ranks.cases import Gradients, batch, loss_fn, numbers, own_stages, pipeline, plain_training, sgd
from support.ranks.models import MICROBATCHES
from support.ranks.programs import OFFLOADED, SPLIT
from support.ranks.replicas import parameters, place
from support.ranks.worker import Ranks
from support.tables import DOCS
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from examples import reference, text
from examples.gpt import Size
from optpipe.errors import InputError
from optpipe.model.placement import Placement, rechunk
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, as_whole, on_all_ranks, profile_layers, stages_of

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def clipped(
    schedules: Sequence[Schedule], max_norm: float, norm_type: float, dtype: torch.dtype
) -> list[tuple[float, Gradients]]:
    modules, seen = {s: module.to(dtype) for s, module in own_stages([0, 1]).items()}, []
    optimizer, m = sgd(*modules.values()), schedules[0].problem.microbatches
    with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
        for step, schedule in enumerate(schedules):
            pipe.load(schedule)
            optimizer.zero_grad()
            pipe.step(*batch(step, m))
            seen.append((pipe.clip_grad_norm_(max_norm, norm_type), numbers(modules)))
            optimizer.step()
    return seen


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(module, optimizer, options=BY_NAME)
    return {"model": parameters, "optimizer": moments}


def restore(module: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], folder: object) -> None:
    dcp.load(saved, checkpoint_id=str(folder))
    values, moments = saved["model"], saved["optimizer"]
    set_state_dict(module, optimizer, model_state_dict=values, optim_state_dict=moments, options=BY_NAME)


def checkpointed(
    schedule: Schedule,
    steps: range,
    folder: object = "",
    resume: bool = False,
    save: bool = False,
    how: str = "alone",
    dropout: float = 0.0,
) -> tuple[list[Any], Gradients]:
    """Trains some steps of a training, from the checkpoint or from the start; losses, and the parameters at the end."""
    placement = [stage.device for stage in schedule.problem.stages]
    here, m = place(alone=how == "alone"), schedule.problem.microbatches
    modules = here.stages(placement, how, dropout)
    model = nn.ModuleDict({str(s): module for s, module in modules.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    if resume:
        for module in modules.values():
            nn.init.zeros_(next(module.parameters()))  # all comes from the checkpoint

    def states() -> dict[str, Any]:
        random = {f"random.{here.number}": torch.get_rng_state()} if dropout else {}
        return state(model, optimizer) | {"scheduler": scheduler.state_dict(), **random}

    with pipeline(modules, schedule, group=here.group) as pipe:
        if resume:
            saved = states()
            restore(model, optimizer, saved, folder)
            scheduler.load_state_dict(saved["scheduler"])
            if dropout:
                torch.set_rng_state(saved[f"random.{here.number}"])
        for step in steps:
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step, m)).losses)
            optimizer.step()
            scheduler.step()
        if save:
            dcp.save(states(), checkpoint_id=str(folder))
    return losses, parameters(modules)


PAGE = (DOCS / "training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"(?<!-->\n\n)^```python\n(.*?)^```$", PAGE, re.M | re.S)
EXAMPLES = ["examples/train_gpt_plain.py", "examples/train_gpt.py", "examples/train_packed.py"]
TEXTS = [(DOCS.parent / name).read_text(encoding="utf-8") for name in EXAMPLES]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_clipping_uses_the_norm_of_the_whole_model(
    ranks: Ranks, norm_type: float, dtype: torch.dtype, rtol: float
) -> None:
    schedules = cases.parsed(SPLIT, OFFLOADED)
    results = ranks(clipped, schedules=schedules, max_norm=0.3, norm_type=norm_type, dtype=dtype)
    stages = [module.to(dtype) for module in cases.make_stages(2)]
    plain = cases.plain_training(stages, cases.batches(2, 4), 4, max_norm=0.3, norm_type=norm_type)
    for (norm, first), (same, last), expected in zip(*results, plain, strict=True):
        assert [norm, same] == pytest.approx([expected.norm] * 2, rel=rtol)
        require_close(first | last, expected.clipped, 100 * rtol, rtol / 10)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_checkpoint_is_resumed(ranks: Ranks, four_ranks: Ranks, tmp_path: Path, dropout: float) -> None:
    """Two ranks train, save and go on; these and, without random numbers, four resume, to the bit."""
    two, four = cases.all_forwards_first([0, 1, 1, 0], 2), cases.all_forwards_first([0, 1, 2, 3], 2)
    ranks(checkpointed, schedule=two, steps=range(2), folder=tmp_path, save=True, dropout=dropout)
    whole = ranks(checkpointed, schedule=two, steps=range(4), dropout=dropout)
    for pool, schedule, last in ((ranks, two, 0), (four_ranks, four, 3))[: 1 if dropout else 2]:
        again = pool(checkpointed, schedule=schedule, steps=range(2, 4), folder=tmp_path, resume=True, dropout=dropout)
        assert again[last][0] == whole[0][0][2:]
        found = {name: parameter for _, own in again for name, parameter in own.items()}
        np.testing.assert_equal(found, whole[0][1] | whole[1][1])


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_checkpoint_of_replicas_is_resumed_without_them(
    ranks: Ranks, four_ranks: Ranks, tmp_path: Path, how: str
) -> None:
    schedule = cases.all_forwards_first([0, 1], 2)
    saved = four_ranks(checkpointed, schedule=schedule, steps=range(2), folder=tmp_path, save=True, how=how)
    loaded = ranks(checkpointed, schedule=schedule, steps=range(0), folder=tmp_path, resume=True)
    for rank in range(2):
        np.testing.assert_equal(loaded[rank][1], saved[rank][1])


def quickly(script: str) -> str:
    """The script, content with the first schedule that a search finds, and with times that are measured once."""
    quick, searches = re.subn(
        r"solve\(problem, time_limit_s=\d+\)", "solve(problem, time_limit_s=100, gap=1.0)", script
    )
    quick, profiles = re.subn(r"(\.profile\(.*), (activation_budget_bytes=)", r"\1, repeats=1, \2", quick)
    assert searches
    assert profiles
    return quick


def test_the_script_in_the_docs_runs(four_ranks: Ranks, tmp_path: Path) -> None:
    said = four_ranks(scripts.run, text=quickly("\n".join(PYTHON)), folder=str(tmp_path))
    assert [len(re.findall(r"step \d: loss \d+\.\d+, gradient norm \d", text)) for text in said] == [0, 3, 0, 3]


def test_ten_lines_of_a_script_are_added() -> None:
    before, after = map(str.splitlines, TEXTS[:2])
    added = [
        line[2:]
        for line in difflib.ndiff(*(lines[lines.index("import argparse") :] for lines in (before, after)))
        if line[:2] == "+ "
    ]
    assert len(list(filter(None, added))) == 14


def test_both_examples_print_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    texts, arguments = (TEXTS[0], quickly(TEXTS[1])), ["--steps", "3"]
    said = [ranks(scripts.run, text=each, folder=str(tmp_path), arguments=arguments) for each in texts]
    plain, ours = ([float(loss) for loss in re.findall(r"step \d: loss (\S+)", "".join(each))] for each in said)
    assert len(plain) == 3
    assert plain == pytest.approx(ours, abs=1.5e-4), "the last of four digits may be rounded up and down"


def test_packed_documents_have_the_losses_of_a_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(scripts.run, text=TEXTS[2], folder=str(tmp_path), arguments=["--steps", "3"])
    size = Size(width=128, blocks=4, context=256)
    documents = text.documents(text.corpus(), size.context)
    plain = reference.trained(size, 2, [text.packed(documents, step, 8, 4) for step in range(3)])
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", "".join(said))]
    assert losses == pytest.approx(list(plain), abs=1e-4)


# Other stages

STEPS = 2  # before and after the change


def rolled(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets, _ = models.data("layers")
    return inputs.roll(step, 1), targets.roll(step, 1)


def profiled() -> Problem:
    return profile_layers(
        models.model("layers"), models.loss_fn, MICROBATCHES, *rolled(0), activation_budget_bytes=10**6, repeats=1
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
    """Trains, saves, and trains on in other stages: problem, schedule, losses, and the names saved each time."""
    measured = profiled()
    assert len(measured.layers or ()) == models.model_layers()
    assert all(layer.forward_ms > 0 for layer in measured.layers or ())
    assert Problem.from_dict(measured.to_dict()) == measured
    problem = steady(measured)
    losses: list[list[float]] = []
    names: list[tuple[str, ...]] = []
    for part, found in enumerate((placed(problem, None), pipelined(problem))):
        schedule = on_all_ranks(found if dist.get_rank() == 0 else None)
        stages, module, optimizer = made(schedule)
        if part:
            for parameter in module.parameters():  # what is not loaded would show
                nn.init.zeros_(parameter)
            restore(module, optimizer, state(module, optimizer), folder)
        with Pipeline(stages, devices(schedule), models.loss_fn, MICROBATCHES) as pipe:
            pipe.load(schedule)
            for step in range(STEPS * part, STEPS * (part + 1)):
                optimizer.zero_grad()
                losses.append(pipe.step(*rolled(step)).losses or [])
                optimizer.step()
        names.append(tuple(module.state_dict()))
        if not part:
            dcp.save(state(module, optimizer), checkpoint_id=folder)
    return problem, schedule, losses, names


def made(schedule: Schedule) -> tuple[dict[int, nn.Module], nn.Module, torch.optim.Optimizer]:
    stages: Any = stages_of(models.model("layers"), schedule)
    module = as_whole(stages)
    return stages, module, torch.optim.AdamW(module.parameters(), lr=0.01)


def devices(schedule: Schedule) -> list[int]:
    return [stage.device for stage in schedule.problem.stages]


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
    data, loss = map(rolled, range(2 * STEPS)), models.loss_fn
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
