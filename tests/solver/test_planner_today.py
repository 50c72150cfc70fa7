"""The planner, told what runs today: what that is, whether it fits, and what is better."""

from dataclasses import replace

import pytest
from support.problems.planning import RESERVED, planned, question

from optpipe import InputError
from optpipe.model.ops import Kind
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Run
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidates import Today, running

pytestmark = pytest.mark.usefixtures("few_choices")


def test_what_is_not_named_of_today_is_the_stacks_default() -> None:
    """However well another cp, ep or micro-batch would do; the replicas are what is left of the GPUs."""
    asked = question(gpus=16, batch=16, model=MODELS["mixtral-8x7b"], gpu=GPUS["B200"], stack="megatron")
    for text, division in {
        "tp 2": (2, 1, 8, 1, 1),
        "tp 1, pp 4, ep 4": (1, 4, 4, 4, 1),
        "pp 2, cp 2": (1, 2, 4, 1, 2),
        "tp 4, pp 2, ep 8": (4, 2, 2, 8, 1),  # over tp · dp, which needs etp 1
    }.items():
        found = running(Today.read(text), asked)
        assert found.candidate.division == division
        assert found.candidate.estimate.run.microbatch_size == 1
        assert found.candidate.estimate.parallelism.zero == 1
        assert ("cp 1" in found.assumed) == ("cp" not in text)
    assert found.candidate.estimate.parallelism.etp == 1
    flags = settings.megatron(replace(found.candidate, schedule=found.schedule))
    assert "--expert-model-parallel-size 8" in flags
    assert "--expert-tensor-parallel-size 1" in flags


@pytest.mark.parametrize("text", ["pp 2, zb-h1", "pp 4, zb-h1, recompute full"])
def test_what_torch_cannot_split_today_is_named_and_predicted_whole(text: str) -> None:
    asked = question(9 * RESERVED, stack="torch", batch=16)
    found = running(Today.read(text), asked)
    assert found.schedule.method == "zb-h1 with whole backwards"
    assert not any(op.kind in (Kind.B, Kind.W) for program in found.schedule.programs for op in program.ops())
    assert found.schedule.problem.stack == "torch"
    alone = running(Today.read("pp 4, zb-h1"), asked)
    assert alone.schedule.method == "zb-h1"
    assert any(op.kind is Kind.W for program in alone.schedule.programs for op in program.ops())


@pytest.mark.parametrize(
    ("text", "cuts", "chunks"),
    [
        ("pp 4, layout Et*2|(t|)*2,ttL, 1f1b", (3, 1, 1, 3), 1),
        ("tp 2,pp 2,--pipeline-model-parallel-layout='E|t|(tt|)*2t|L|', interleaved", None, 0),
        ('tp 2, pp 2, pipeline_model_parallel_layout: "E|tt||ttttL",interleaved', (1, 2, 0, 5), 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|ttttttL, tp 2", (1, 7), 1),
    ],
)
def test_a_layout_of_megatron_is_what_stages_have_today(text: str, cuts: tuple[int, ...] | None, chunks: int) -> None:
    asked = question(9 * RESERVED, stack="megatron")
    if cuts is None:
        with pytest.raises(InputError, match=r"one E in the first stage, .* and one L in the last stage"):
            running(Today.read(text), asked)
        return
    found = running(Today.read(text), asked)
    assert found.candidate.estimate.cuts == cuts
    assert found.candidate.estimate.parallelism.chunks == chunks
    assert not any("chunks" in each for each in found.assumed)
    counted = [len(stage) for stage in found.candidate.estimate.stages]
    assert [stage.forward_ms > 0 for stage in found.schedule.problem.stages] == [count > 0 for count in counted]


def test_a_layout_has_as_many_prediction_modules_as_are_asked_for() -> None:
    asked = question(9 * RESERVED, stack="megatron", run=Run(microbatches=1, mtp=1))
    found = running(Today.read("pp 4, layout Ettt|tt|tm|L"), asked)
    assert found.candidate.estimate.parallelism.mtp_stage == 2
    with pytest.raises(InputError, match="has 2 multi-token prediction modules, so --mtp 2"):
        running(Today.read("pp 4, layout Ettt|tt|tmm|L"), asked)


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        ("pp 2, zb-h1", "tp 1, cp 1, zero 1, chunks 1, sequences 1, recompute none"),
        ("pp 2, interleaved, sequences 2", "tp 1, cp 1, zero 1, chunks 2, recompute none"),
        ("tp 2, dp 2, cp 1, zero 1, recompute full", "pp 1, sequences 1, 1f1b"),
        ("pp 2, chunks 3, sequences 2", "tp 1, cp 1, zero 1, recompute none, interleaved"),
    ],
)
def test_all_that_is_not_named_of_today_is_listed(text: str, assumed: str) -> None:
    """But dp, which follows from the GPUs."""
    assert running(Today.read(text), question()).assumed == tuple(assumed.split(", "))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp 2, dp 4", "tp 2 · pp 1 · cp 1 · dp 4 are 8 GPUs, there are 4"),
        ("tp 3", "tp 3 · pp 1 · cp 1 · dp 1 are 3 GPUs, there are 4"),
        ("dp 4, sequences 3", "4 replicas of micro-batches of 3 sequences must divide the batch of 8"),
        ("pp 4, zb-v, chunks 3", "chunks = 4: 12 stages|pp · chunks = 12"),
        ("pp 2, zb-v, chunks 3", "zb-v is not a schedule of tp 1, pp 2.*; name one"),
        ("pp 4, layout Ettt|ttL", "2 stages: expected as many on each of pp = 4 ranks"),
        ("pp 2, layout Ettt|ttL", "layers add up to 5: the model has 6"),
        ("pp 2, layout Ettt|tttL, chunks 2", "has 1 stages a rank, not chunks 2"),
        ("pp four", "'pp four' is neither a number of tp, pp"),
    ],
)
def test_what_today_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        running(Today.read(text), question())


def test_a_run_that_is_out_of_memory_gets_a_plan() -> None:
    asked = question()
    plan = planned(asked, today="pp 2, 1f1b")
    assert plan.today
    assert not plan.today.fits
    assert plan.today.used_bytes > asked.gpu.memory_bytes
    assert plan.best.schedule
    assert max(plan.best.used_bytes(plan.best.schedule)) <= asked.gpu.memory_bytes
    assert sum(plan.counts) == len(plan.ranked)
    ample = planned(question(10 * asked.gpu.memory_bytes), today="pp 2, 1f1b").today
    assert ample
    assert ample.fits
    assert (ample.used_bytes, ample.iteration_ms) == (plan.today.used_bytes, plan.today.iteration_ms)


def test_the_division_of_a_run_that_is_out_of_memory_is_tried_though_others_are_better() -> None:
    """It fits with recomputation; a plan without today rules it out by bounds."""
    asked = question(RESERVED + 4_500_000_000, stack="megatron")
    plan = planned(asked, today="pp 2")
    assert plan.today
    division = plan.today.candidate.division
    assert (plan.today.fits, division) == (False, (1, 2, 2, 1, 1))
    assert plan.best.division != division
    same = next(c for c in plan.ranked if c.division == division)
    assert same.schedule
    assert same.estimate.run.recompute == "full"
    assert not [c for c in planned(asked).ranked if c.division == division and c.schedule]
