"""The planner, told what runs today: what that is, whether it fits, and what is better."""

from dataclasses import replace

import pytest
from support.problems.planning import RESERVED, every, planned, question

from optpipe import InputError
from optpipe.model.ops import Kind
from optpipe.options import SearchOptions
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Run
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidates import BY_DEFAULT
from optpipe_solver.planner.search import PlanSearch
from optpipe_solver.planner.today import Today, running
from optpipe_solver.systems import generate

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
        ("pp 4, vp 1, --decoder-first-pipeline-num-layers 0 --decoder-last-pipeline-num-layers 2", (1, 2, 2, 3), 1),
        ("tp 2, pp 2, vp 2, model.num_layers_in_last_pipeline_stage=2", (3, 1, 2, 2), 2),
        ("tp 2, --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", (2, 1, 1, 1, 1, 2), 3),
        (
            "pp 4 vp 1 model.account_for_embedding_in_pipeline_split=True account_for_loss_in_pipeline_split=true",
            (2,) * 4,
            1,
        ),
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
        ("pp 2, vpp 2, num_layers_per_virtual_pipeline_stage 1", "1 layers a chunk do not divide 6 so"),
        (
            "pp 4, num_layers_in_first_pipeline_stage=1",
            "first = 1: expected numbers that leave the others of 4 ranks equal shares of 6 layers",
        ),
        ("pp 2, layout Ettt|tttL, num_layers_in_first_pipeline_stage=1", "which layers a stage has, also first"),
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


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("TP 2 PP 2 VP n/a MBS 2 GBS 8", "tp 2, pp 2, sequences 2, gbs 8"),
        ("--tp 2 --pp 2 --vp 3", "tp 2, pp 2, chunks 3"),
        ("TP2 PP2 VPP3", "tp 2, pp 2, chunks 3"),
        ("tp2, pp=2, mbs: 2", "tp 2, pp 2, sequences 2"),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --micro-batch-size 2",
            "tp 2, pp 2, sequences 2",
        ),
        (
            "model.tensor_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=3 "
            "model.pipeline_model_parallel_size=2 model.pipeline_model_parallel_layout=null train.micro_batch_size=1",
            "tp 2, pp 2, chunks 3, sequences 1",
        ),
        ("pp 4 --recompute-granularity full", "pp 4, recompute full"),
        (
            "pp 4, model.recompute_granularity=selective model.recompute_modules=[layernorm,moe_act]",
            "pp 4, recompute cheap",
        ),
        ("pp 4, --recompute-granularity selective --recompute-modules core_attn", "pp 4, recompute selective"),
        ("pp 4, model.recompute_granularity=null", "pp 4, recompute none"),
    ],
)
def test_today_has_the_names_that_people_paste(text: str, has: str) -> None:
    read, expected = Today.read(text), Today.read(has)
    assert (read.degrees, read.recompute, read.written) == (expected.degrees, expected.recompute, {})


def test_todays_options_may_have_pythons_capitals() -> None:
    asked = question(9 * RESERVED, stack="megatron")
    running(Today.read("model.tensor_model_parallel_size=2 model.sequence_parallel=True pp 2"), asked)


@pytest.mark.parametrize("bridge", [False, True])
def test_what_a_plan_writes_is_what_today_reads(bridge: bool) -> None:
    """Every division of a mixture of experts, as flags of Megatron-LM and as options of Megatron-Bridge."""
    run = Run(microbatches=1, precision="mxfp8", gradient_bytes=2, **BY_DEFAULT["megatron"])
    small = MODELS["mixtral-8x7b"].model_copy(update={"layers": 7, "sequence": 1024})
    asked = question(model=small, gpu=GPUS["GB200"], gpus=8, batch=16, stack="megatron", run=run)
    tried = 0
    for candidate in every(asked)[::17]:
        division, levels = candidate.estimate.parallelism, candidate.estimate.run.recompute
        method = "interleaved" if division.chunks > 1 else "1f1b"
        if division.chunks > 1 and candidate.estimate.run.microbatches % division.pp:
            continue
        made = replace(candidate, schedule=generate(method, candidate.problem))
        found = running(Today.read(" ".join((settings.bridge if bridge else settings.megatron)(made))), asked)
        assert found.candidate.estimate.cuts == made.estimate.cuts
        assert found.candidate.division == made.division
        assert found.candidate.estimate.run == made.estimate.run, levels
        assert found.candidate.estimate.parallelism.zero == division.zero
        own = {line.partition("=")[0] for line in settings.bridge(made)}
        assert {f"model.expert_{each}_parallel_size" for each in ("model", "tensor")} <= own  # not the recipe's
        tried += 1
    assert tried > 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp 2 --frobnicate 3", "frobnicate 3 is not counted: no plan writes it"),
        ("pp 2 --fp8-format hybrid", "fp8-format hybrid is not counted: no plan writes it"),
        (
            "pp 2, mixed_precision=bf16_with_mxfp8_mixed",
            "mixed-precision bf16_with_mxfp8_mixed is not counted: mixed-precision is bf16_mixed",
        ),
        ("pp 2, gbs 16", "batch 16, but --batch is 8"),
        ("pp 2 --seq-length 4096", "sequence 4096, but --sequence is 2048"),
        ("pp 2, --pp 4", "pp = 4: pp is 2 already"),
        ("pp 2 --recompute-granularity selective --recompute-modules mlp", "recompute-modules mlp is not counted"),
        ("pp 2, dualpipe", "dualpipe holds all parameters twice, which no plan counts"),
    ],
)
def test_what_today_does_not_count_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        running(Today.read(text), question(9 * RESERVED, stack="megatron"))


def test_it_says_with_which_assumptions_it_would_fit() -> None:
    """NVIDIA's recipes have gradients of 16 bits, and an optimizer of 8 bytes a parameter where theirs are, too."""
    alone = running(Today.read("pp 2, dp 2"), question(2**45)).used_bytes
    halved = {"gradient_bytes": 2, "optimizer_bytes": 8}
    for fields, words in (
        ({"gradient_bytes": 2}, "--gradient-bytes 2 ("),
        (halved, "--gradient-bytes 2 --optimizer-bytes 8 ("),
    ):
        needs = running(Today.read("pp 2, dp 2"), question(2**45, run=Run(microbatches=1, **fields))).used_bytes
        found = running(Today.read("pp 2, dp 2"), question(needs))
        assert needs < alone == found.used_bytes
        assert found.fitting[0].startswith(words)
    needs = running(Today.read("pp 2, dp 2, recompute full"), question(2**45)).used_bytes
    assert running(Today.read("pp 2, dp 2"), question(needs)).fitting[1:] == (f"recompute full ({needs / 1e9:.1f} GB)",)
    assert not running(Today.read("pp 2, dp 2"), question(alone)).fitting
    assert not running(Today.read("pp 2, dp 2"), question(RESERVED + 2**20)).fitting


def test_the_layers_of_today_are_not_called_balanced() -> None:
    asked = question(9 * RESERVED, stack="megatron")
    own = running(Today.read("pp 2, layout Ettttt|tL"), asked).candidate
    even = running(Today.read("pp 2, layout Ettt|tttL"), asked).candidate
    assert str(own) == "tp 1, pp 2, dp 2, 4 × 1 sequence, uneven layers"
    assert str(even) == "tp 1, pp 2, dp 2, 4 × 1 sequence"


def test_time_that_is_up_before_anything_fits_is_said_with_what_today_needs() -> None:
    options = SearchOptions(time_limit_s=10_000.0)
    search = PlanSearch(question(), lambda problem, start, seconds: None, options, 1, Today.read("pp 2, 1f1b"))
    search.cancel()
    with pytest.raises(
        InputError, match=r"a longer time would be right; today needs [\d.]+ of 7.5 GB, and is not compared"
    ):
        search.run()
