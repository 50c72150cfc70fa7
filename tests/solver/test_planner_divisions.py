"""What the planner chooses from: divisions of a model over GPUs that each stack can run; and the settings of other
stacks that make them."""

import re
from dataclasses import replace

import pytest
from support.problems.planning import RESERVED, SMALL, every, planned, question

from optpipe import InputError
from optpipe.formats.modules import AUTOMODEL
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Precision, Run, StateSpace
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import BY_DEFAULT
from optpipe_solver.planner.search import published
from optpipe_solver.planner.today import Today, running
from optpipe_solver.systems import generate

pytestmark = pytest.mark.usefixtures("few_choices")


def test_nothing_leaves_to_the_host_where_that_is_not_allowed() -> None:
    """Nor do checkpoints."""
    for offload in (True, False):
        problem = every(question(9 * RESERVED, offload=offload))[0].problem
        each = [*problem.stages, *(problem.layers or ())]
        assert {costs.can_offload or costs.can_offload_checkpoints for costs in each} == {offload}
        assert any(costs.can_recompute for costs in each)


def test_a_margin_is_neither_held_nor_used() -> None:
    whole, less = (every(question(margin=margin)) for margin in (0.0, 0.25))
    by_name = {str(c): c for c in whole}
    memory = question().gpu.memory_bytes
    for candidate in less:
        other = by_name[str(candidate)]
        assert candidate.state_bytes == other.state_bytes
        budgets = zip(candidate.estimate.devices, other.estimate.devices, strict=True)
        assert all(b.budget - a.budget == memory - round(0.75 * memory) for a, b in budgets)


def test_gradients_are_reduced_over_replicas() -> None:
    """2(n - 1)/n of the bytes, over all network cards of a node as every replica is one of its GPUs."""
    divided = {c.division: c.estimate for c in every(question()) if c.estimate.parallelism.zero < 2}
    assert divided[2, 2, 1, 1, 1].reduction_ms == 0
    made = divided[1, 1, 4, 1, 1]
    weights = made.parameters
    speed = made.gpu.gpus_per_node * made.gpu.network_bytes_per_s * made.gpu.network_fraction
    steps_ms = 2 * 3 * made.gpu.link_us / 1000
    assert made.reduction_ms == pytest.approx(3 / 4 * 6 * weights / speed * 1000 + steps_ms)


def test_divisions_are_whole() -> None:
    for candidate in every(question()):
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        assert parallelism.gpus == 4
        assert parallelism.tp <= 2
        assert run.microbatches * run.microbatch_size * parallelism.dp == 8
        assert sum(parallelism.layers or (6,)) == 6


def test_experts_are_divided_over_replicas() -> None:
    asked = question(model=MODELS["mixtral-8x7b"], gpus=8, gpu=GPUS["H200"])
    divisions = {c.division for c in every(asked)}
    assert {ep for _, _, dp, ep, _ in divisions if dp == 8} == {1, 2, 4, 8}
    for stack in ("megatron", "torch"):
        divided = every(asked.model_copy(update={"stack": stack}))
        found = {(c.division[0], c.division[2], c.division[3], c.estimate.parallelism.etp) for c in divided}
        assert (2, 4, 8, 1) in found  # undivided experts over all GPUs of a stage
        assert ((2, 4, 4, None) in found) == (stack == "megatron")  # torch divides no expert


def test_context_parallelism_divides_what_replicas_cannot() -> None:
    """Sequences of flash attention, into two halves a GPU; with fewer sequences than GPUs it takes all of them."""
    few = {c.estimate.parallelism.cp for c in every(question(batch=1))}
    assert few == {1, 2, 4}
    odd = question(model=SMALL.model_copy(update={"sequence": 1026}))
    unfused = question(run=Run(microbatches=1, attention="unfused"))
    assert {c.estimate.parallelism.cp for asked in (odd, unfused) for c in every(asked)} == {1}
    for candidate in every(question()):
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        assert parallelism.cp == 1 or run.microbatch_size == 1  # else replicas send less


def test_zero_is_what_the_stack_has() -> None:
    for stack, stages in (("optpipe", {0, 1, 2}), ("torch", {0, 1, 3}), ("megatron", {0, 1, 3})):
        assert {c.estimate.parallelism.zero for c in every(question(stack=stack))} == stages
    titan = next(c for c in every(question(stack="torch")) if c.estimate.parallelism.zero == 3)
    assert titan.estimate.parallelism.pp == 1
    assert "--parallelism.fsdp_reshard_after_forward always" in settings.torchtitan(titan, "")


def test_more_of_zero_takes_longer_and_less_memory() -> None:
    """Within a micro-batch gradients are reduced and weights gathered; at the end of the iteration less is left."""
    gpu = GPUS["A100"].model_copy(update={"link_us": 0.0})
    by_stage = {zero: estimate(SMALL, Parallelism(dp=4, zero=zero), gpu, Run(microbatches=8)) for zero in range(4)}
    busy = [made.busy_ms[0] for made in by_stage.values()]
    state = [made.devices[0].state for made in by_stage.values()]
    rest = [made.reduction_ms for made in by_stage.values()]
    assert busy[0] == busy[1] < busy[2] < busy[3]
    assert state == sorted(state, reverse=True)
    assert rest == sorted(rest, reverse=True)
    assert rest[3] == 0
    gathered = busy[3] - busy[2]  # 2 bytes a weight before F and before B, each three quarters over the ring
    speed = gpu.link_bytes_per_s * gpu.link_fraction
    assert gathered == pytest.approx(2 * 2 * 3 / 4 * by_stage[3].parameters / speed * 1000, rel=1e-6)


def test_without_offload_nothing_leaves() -> None:
    asked = question(offload=False)
    candidate = next(c for c in every(asked) if c.state_bytes < asked.gpu.memory_bytes)
    assert not any(stage.can_offload for stage in candidate.problem.stages)


def placed(**changes: object) -> Candidate:
    (found, *_) = (
        c
        for c in every(question())
        if all(getattr(c.estimate.parallelism, name) == value for name, value in changes.items())
    )
    return found


def scheduled(candidate: Candidate, method: str = "1f1b") -> Candidate:
    candidate.schedule = generate(method, candidate.problem)
    return candidate


def test_settings_of_other_stacks() -> None:
    """Each stage has its modules: the four programs divide layers in other ways, if they are left to it."""
    looped, folded = (placed(pp=2, tp=2, chunks=2, shape=shape) for shape in ("looped", "v"))
    assert looped.estimate.cuts == (3, 2, 2, 1)  # the embedding with two layers, and the head alone
    titan = settings.torchtitan(folded, "s.csv")
    assert "--parallelism.pipeline_parallel_schedule ZBVZeroBubble" in titan
    assert "--training.disable_cuda_graphs" in titan
    assert titan[-1] == "activation-checkpoint:none"  # no flag is read behind it
    run, sequence = folded.estimate.run, folded.estimate.sequence
    later = settings.torchtitan(folded, "s.csv", tokens=True)
    assert [flag for flag in later if flag not in titan] == [
        f"--training.max_context_length {sequence}",
        f"--training.num_tokens_per_microbatch_per_dp_rank {run.microbatch_size * sequence}",
        f"--training.num_tokens_per_train_step {run.microbatches * run.microbatch_size * sequence}",
        f"--parallelism.num_pp_microbatches {run.microbatches}",
    ]
    assert not any(re.search("seq_len|batch_size|microbatch_size", flag) for flag in later)
    parts = "tok_embeddings,layers.0,layers.1 layers.2,layers.3 layers.4,layers.5 norm,lm_head"
    assert f"--parallelism.module_fqns_per_model_part {parts}" in settings.torchtitan(looped, "s.csv")
    yaml = settings.nemo(looped, "s.csv")
    assert "    pp_schedule: Interleaved1F1B" in yaml
    assert "    - [model.embed_tokens, model.layers.0, model.layers.1, model.rotary_emb]" in yaml
    assert yaml[-1] == "    - [model.norm, lm_head, model.rotary_emb]"
    flags = settings.megatron(scheduled(looped, "interleaved"))
    assert "--pipeline-model-parallel-layout 'Ett|tt|tt|L'" in flags
    assert "--microbatch-group-size-per-virtual-pipeline-stage 2" in flags
    assert "--untie-embeddings-and-output-weights" in flags
    assert [line for line in settings.bridge(looped) if "pipeline" in line or "share" in line or "size" in line] == [
        "model.tensor_model_parallel_size=2",
        "train.micro_batch_size=2",
        "train.global_batch_size=8",
        "model.pipeline_model_parallel_size=2",
        "model.pipeline_model_parallel_layout='Ett|tt|tt|L'",
        "model.microbatch_group_size_per_vp_stage=2",
        "model.share_embeddings_and_output_weights=false",
        "model.virtual_pipeline_model_parallel_size=2",
        "model.context_parallel_size=1",
        "model.num_layers_in_first_pipeline_stage=null",  # which no layout can have beside it
        "model.num_layers_in_last_pipeline_stage=null",
        "model.account_for_embedding_in_pipeline_split=false",
        "model.account_for_loss_in_pipeline_split=false",
    ]
    alone = set(settings.bridge(placed(tp=1, pp=1, dp=4)))  # a recipe's own pipeline would stay
    assert {"model.pipeline_model_parallel_size=1", "model.sequence_parallel=false"} <= alone
    run = looped.estimate.run.model_copy(update={"mtp": 2})
    for stage, layout in (None, "Ett|tt|tt|mmL"), (2, "Ett|tt|ttmm|L"):
        division = looped.estimate.parallelism.model_copy(update={"mtp_stage": stage, "layers": (2, 2, 2, 0)})
        further = question(9 * RESERVED).candidate(estimate(looped.estimate.shape, division, GPUS["H100"], run))
        flags = settings.megatron(scheduled(further, "interleaved"))
        assert f"--pipeline-model-parallel-layout '{layout}'" in flags
        assert "--mtp-num-layers 2" in flags


def test_a_plan_puts_prediction_modules_where_the_longest_stage_is_shortest() -> None:
    """Two modules take as long as two layers: with them before the head no stage of four has three."""
    asked = question(9 * RESERVED, run=Run(microbatches=1, mtp=2), stack="megatron")
    made = [c.estimate for c in every(asked) if c.estimate.parallelism.mtp_stage is not None]
    apart = [each for each in made if each.parallelism.mtp_stage < each.parallelism.stages - 1]
    assert apart
    for each in apart:
        assert each.cuts[-1] == 1
        together = each.divided(each.parallelism.model_copy(update={"mtp_stage": None, "layers": None}), each.run)
        assert max(stage.forward_ms for stage in each.problem.stages) < max(
            stage.forward_ms for stage in together.problem.stages
        )


def test_pairs_that_hide_all_to_all_are_planned_for_megatron() -> None:
    """No bound is above a schedule with pairs; its flags are there with a pipeline and without one."""
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 8192}
    run = Run(microbatches=1, overlap="experts")
    roomy = question(10 * RESERVED, model=SMALL.model_copy(update=experts), run=run, stack="megatron")
    beside = [(c, s) for c in every(roomy) for s in published(c, "megatron") if s.method == "combined-1f1b"]
    paired = [(c, s) for c, s in beside if len(s.compiled.rows.first)]
    assert {c.estimate.parallelism.pp for c, _ in paired} >= {1, 2}
    for candidate, schedule in paired:
        assert candidate.bound_ms <= candidate.with_step_end(schedule.makespan_ms) * (1 + 1e-9)
        assert candidate.take(schedule)
        flags = settings.megatron(candidate)
        assert {"--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type alltoall"} <= {*flags}
        assert any("layout" in flag for flag in flags) == (candidate.estimate.parallelism.pp > 1)
        assert sum(candidate.parts_ms.values()) == pytest.approx(candidate.iteration_ms)


def test_megatron_combines_no_forward_and_backward_with_prediction_on_one_device() -> None:
    """megatron-core 0.16.1 and 0.19.2, transformer_config.py: pp must be larger than 1 then."""
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 8192}
    run = Run(microbatches=1, overlap="experts", mtp=1)
    roomy = question(10 * RESERVED, model=SMALL.model_copy(update=experts), run=run, stack="megatron")
    found = {(c.estimate.parallelism.pp, s.method) for c in every(roomy) for s in published(c, "megatron")}
    assert (2, "combined-1f1b") in found
    assert (1, "1f1b") in found
    assert (1, "combined-1f1b") not in found


@pytest.mark.parametrize(
    ("precision", "flags", "mix"),
    [
        ("bf16", "--bf16", "bf16_mixed"),
        ("fp8", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "bf16_with_fp8_current_scaling_mixed"),
        ("mxfp8", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "bf16_with_mxfp8_mixed"),
        ("nvfp4", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", "bf16_with_nvfp4_mixed"),
    ],
)
def test_precision_and_overlap_are_asked_of_megatron(precision: Precision, flags: str, mix: str) -> None:
    candidate = placed(pp=1, tp=2, dp=2, zero=1)
    run = candidate.estimate.run.model_copy(update={"precision": precision, "overlap": "all"})
    changed = replace(candidate, estimate=replace(candidate.estimate, run=run))
    further = {"--overlap-grad-reduce --overlap-param-gather", "--tp-comm-overlap", flags}
    assert {*settings.megatron(changed)} - {*settings.megatron(candidate)} == further - {"--bf16"}
    asked = {f"ddp.overlap_{name}=true" for name in ("grad_reduce", "param_gather")}
    asked |= {"comm_overlap.tp_comm_overlap=true", f"mixed_precision={mix}"}
    assert {*settings.bridge(changed)} - {*settings.bridge(candidate)} == asked - {"mixed_precision=bf16_mixed"}


@pytest.mark.parametrize(
    ("run", "stack", "message"),
    [
        ({"mtp": 1}, "torch", "mtp = 1: expected 0 with stack torch"),
        ({"mtp": 1, "hybrid": True}, "megatron", "mtp = 1: expected 0 for a hybrid with stack megatron"),
        ({"overlap": "experts", "hybrid": True}, "megatron", "overlap = experts: expected all, as Megatron's combined"),
        ({"overlap": "experts", "mtp": 2}, "megatron", "overlap = experts: expected all, as Megatron's combined"),
        ({"overlap": "experts", "precision": "fp32"}, "megatron", "overlap = experts: expected all"),
        ({"moe_expert_capacity_factor": 1.5}, "torch", "moe_expert_capacity_factor: expected none with stack torch"),
        (
            {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True, "dispatch": "once"},
            "megatron",
            "moe_pad_expert_input_to_capacity = true: expected dispatch alltoall, as DeepEP never pads",
        ),
    ],
)
def test_what_no_settings_are_written_for_is_not_planned(run: dict[str, int], stack: str, message: str) -> None:
    model = MODELS["nemotron-3-nano"] if run.pop("hybrid", False) else SMALL
    with pytest.raises(InputError, match=message):
        question(run=Run.from_dict({"microbatches": 1, **run}, "run"), stack=stack, model=model)


def test_adapters_are_settings_of_those_that_have_them() -> None:
    found = placed(pp=2, tp=2, chunks=1)
    run = found.estimate.run.model_copy(update={"lora": 8})
    found = scheduled(replace(found, estimate=replace(found.estimate, run=run)))
    (comment,), (other,) = settings.megatron(found), settings.torchtitan(found, "")
    assert comment.startswith("# no flags: Megatron-LM has no LoRA")
    assert other.startswith("# no flags: torchtitan has LoRA")
    assert "peft.dim=8" in settings.bridge(found)
    assert settings.nemo(found, "")[-4:][::3] == ["peft:", "  dim: 8"]
    small = {"stack": "megatron", "run": Run(microbatches=1, lora=8)}
    assert planned(question(**small)).best.iteration_ms < planned(question(stack="megatron")).best.iteration_ms


def test_megatron_is_asked_for_what_is_predicted() -> None:
    """Nothing of it is its default: what is sent beside computing, by which kernels tokens reach experts, precision."""
    model = SMALL.model_copy(update={"experts": 4, "experts_per_token": 2, "expert_ffn": 512})
    run = {"microbatches": 1, "precision": "mxfp8", "gradient_bytes": 2} | BY_DEFAULT["megatron"]
    run |= {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    asked = question(9 * RESERVED, model=model, gpu=GPUS["GB200"], stack="megatron", run=Run.from_dict(run, "run"))
    every_one = {
        (c.division, c.estimate.parallelism.zero): c for c in every(asked) if c.estimate.run.recompute == "none"
    }
    flags = " ".join(settings.megatron(every_one[(2, 1, 2, 2, 1), 1]))
    for flag in (
        "--tp-comm-overlap",
        "--overlap-grad-reduce --overlap-param-gather",
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--moe-grouped-gemm --moe-permute-fusion",
        "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
        "--grad-reduce-in-bf16",
        "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    ):
        assert flag in flags
    lines = settings.bridge(every_one[(2, 1, 2, 2, 1), 1])
    assert {"model.virtual_pipeline_model_parallel_size=null", "model.moe_shared_expert_overlap=false"} < {*lines}
    assert {"model.moe_expert_capacity_factor=1.25", "model.moe_pad_expert_input_to_capacity=true"} < {*lines}
    assert "dataset.seq_length=2048" in lines
    assert lines[0] == "mixed_precision=bf16_with_mxfp8_mixed"
    assert {"mixed_precision.grad_reduce_in_fp32=false", "comm_overlap.tp_comm_overlap=true"} < {*lines}
    assert not [line for line in lines if "fp8_recipe" in line]
    assert "--use-megatron-fsdp" in " ".join(settings.megatron(every_one[(1, 1, 4, 1, 1), 3]))
    plain = every_one[(1, 4, 1, 1, 1), 0]
    alone = replace(plain, estimate=replace(plain.estimate, run=Run(microbatches=8)))
    flags = " ".join(settings.megatron(alone))
    assert "overlap" not in flags
    assert "capacity" not in flags
    assert {"model.moe_expert_capacity_factor=null"} < {*settings.bridge(alone)}
    assert "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --untie" in flags


@pytest.mark.parametrize(("name", "layers"), [("nemotron-3-nano", "MEMEM*E"), ("qwen3-next-80b-a3b", "GEGEGE*E")])
def test_a_hybrid_has_megatrons_hybrid_pattern(name: str, layers: str) -> None:
    asked = question(80 * RESERVED, model=MODELS[name], stack="megatron", gpu=GPUS["B200"], gpus=8, batch=8)
    found = next(c for c in every(asked) if c.estimate.parallelism.pp == 4 and c.estimate.parallelism.chunks == 1)
    (written,) = (line for line in settings.megatron(scheduled(found)) if "pattern" in line or "layout" in line)
    stages = written.removeprefix("--hybrid-layer-pattern '").removesuffix("'").split("|")
    assert "".join(stages).startswith(layers)
    letters = settings.hybrid_letters(MODELS[name])
    assert [len(stage) // len(letters[0]) for stage in stages] == [
        sum(found.estimate.pieces[i].is_layer for i in stage) for stage in found.estimate.stages
    ]
    today = running(Today.read(f"pp 4, {written}, ep {found.estimate.parallelism.ep}"), asked)
    assert today.candidate.estimate.cuts == found.estimate.cuts
    with pytest.raises(InputError, match=r"stage 0 has 'M?-', the model"):
        running(Today.read("pp 2, pattern M-|-"), asked)


def test_tensor_parallelism_divides_a_state_space() -> None:
    mixer = StateSpace(kind="mamba", heads=3, head_size=128, groups=1, state=16)
    model = SMALL.model_copy(update={"state_space": mixer, "parts": ("M-",) * 5 + ("*-",)})
    assert {c.estimate.parallelism.tp for c in every(question(9 * RESERVED))} == {1, 2}
    assert {c.estimate.parallelism.tp for c in every(question(9 * RESERVED, model=model))} == {1}


def test_a_candidate_holds_what_its_own_estimate_says() -> None:
    """Whichever division its pieces were computed for."""
    for candidate in every(question(9 * RESERVED, run=Run(microbatches=1, mtp=1))):
        own = candidate.estimate
        assert own.devices == estimate(own.shape, own.parallelism, own.gpu, own.run).devices


def test_automodel_is_not_given_names_that_its_pipelines_do_not_know() -> None:
    looped = placed(pp=2, tp=2, chunks=2, shape="looped")

    def yaml(**changes: object) -> list[str]:
        shape = looped.estimate.shape.model_copy(update=changes)
        return settings.nemo(replace(looped, estimate=replace(looped.estimate, shape=shape)), "s.csv")

    assert yaml(modules=AUTOMODEL) == yaml()
    (line,) = yaml(modules=AUTOMODEL.model_copy(update={"layer": "transformer.h"}))
    assert line.startswith("# no settings: the model's modules are model.embed_tokens, transformer.h.N, model.norm")
    assert yaml(window=512)[0] == "# AutoModel 0.7.0 drops the window of 512 tokens in a pipeline: outputs are wrong"
    assert yaml(window=512)[1:] == yaml()


def test_without_a_pipeline_no_stage_is_told() -> None:
    candidate = placed(pp=1, dp=4, zero=1)
    for lines in (settings.torchtitan(candidate, ""), settings.nemo(candidate, ""), settings.megatron(candidate)):
        assert not [line for line in lines if "fqns" in line or "layout" in line]
    assert "--parallelism.fsdp_reshard_after_forward never" in settings.torchtitan(candidate, "")


def test_torch_has_at_least_as_many_micro_batches_as_ranks() -> None:
    assert all(
        c.estimate.run.microbatches >= c.estimate.parallelism.pp for c in every(question(batch=4, stack="torch"))
    )


@pytest.mark.parametrize("stack", ["torch", "megatron"])
def test_other_stacks_divide_sequences_evenly(stack: str) -> None:
    odd = question(model=SMALL.model_copy(update={"sequence": 2050}), stack=stack)
    divisions = {(c.division[0], c.division[4]) for c in every(odd)}
    assert divisions == {(1, 1), (2, 1)}  # tp and cp: 4 divides no 2050, of tp 2 and cp 2 there are 8 parts


def test_megatron_is_asked_for_no_groups_that_it_does_not_have() -> None:
    """Of 10 micro-batches in groups of 4 it would leave 2 for the last one, fewer than ranks; ours are 4, 3 and 3."""
    candidate = next(
        c
        for c in every(question(batch=10, stack="megatron", gpus=3, gpu=GPUS["B200"]))
        if (c.estimate.parallelism.pp, c.estimate.parallelism.chunks, c.estimate.run.microbatches) == (3, 2, 10)
    )
    assert [schedule.method for schedule in published(candidate, "optpipe") if schedule.method == "interleaved"]
    assert not list(published(candidate, "megatron"))
