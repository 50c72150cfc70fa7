"""The planner: what it chooses from; its answer is that of trying everything, fits, and follows the memory; what it
says of its parts, and the settings of other stacks that make them."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from optpipe import InputError, OptPipeError, check, export_schedule
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.formats.modules import AUTOMODEL
from optpipe.model.ops import Kind
from optpipe.options import SearchOptions
from optpipe.transformer.calibrate import NAMES, UNEXPLAINED
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe_solver import tuning
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidate import Candidate, difference
from optpipe_solver.planner.candidates import Question, Today, candidates, running
from optpipe_solver.planner.search import Plan, PlanSearch, published
from optpipe_solver.systems import generate

SMALL = Transformer(layers=6, hidden=2048, ffn=8192, heads=2, vocabulary=64_000, sequence=2048)
RESERVED = GPUS["A100"].reserved_bytes


def question(memory_bytes: int = RESERVED + 3_200_000_000, **fields: object) -> Question:
    """Six layers on four GPUs, so little memory that activations decide."""
    gpu = GPUS["A100"].model_copy(update={"memory_bytes": memory_bytes, "gpus_per_node": 2})
    asked = {"model": SMALL, "gpu": gpu, "gpus": 4, "batch": 8, "run": Run(microbatches=1), "margin": 0.0}
    return Question.from_dict(asked | fields)


def planned(asked: Question, gap: float = 0.0, today: str | None = None) -> Plan:
    """A plan without searches; its other work is counted, and there is enough of it for everything."""
    options = SearchOptions(time_limit_s=10_000.0, gap=gap)
    runs = Today.read(today) if today else None
    return PlanSearch(asked, lambda problem, start, seconds: None, options, 1, runs).run()


@pytest.fixture(scope="module", autouse=True)
def _few_choices() -> Iterator[None]:
    """Micro-batches of one or two sequences, and two chunks at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "MICROBATCH_SIZES", (1, 2))
        patch.setattr(tuning, "CHUNKS", 2)
        yield


@pytest.fixture(scope="module")
def found() -> Plan:
    return planned(question())


def everything(asked: Question) -> float:
    """The shortest iteration that any published schedule or list scheduling has, of all candidates, without bounds."""
    best = NO_SCHEDULE_MS
    for candidate in candidates(asked):
        if candidate.state_bytes >= asked.gpu.memory_bytes or infeasibility(candidate.problem):
            continue
        listed = []
        with contextlib.suppress(OptPipeError, StopIteration):
            if asked.stack != "megatron":
                listed.append(next(STREAMS["adaoffload"](candidate.problem, "makespan")))
        for schedule in (*published(candidate, asked.stack), *listed):
            if not check(schedule.problem, schedule):
                best = min(best, candidate.with_step_end(schedule.makespan_ms))
    return best


def test_it_finds_what_trying_everything_finds(found: Plan) -> None:
    assert sum(found.counts) == len(found.ranked)
    assert found.counts.too_large > 0
    fewer = planned(question(), gap=0.3).counts.scheduled
    assert found.counts.ruled_out > found.counts.scheduled > fewer
    assert found.best.iteration_ms == pytest.approx(everything(question()), rel=1e-9)


def test_bounds_hold_and_schedules_fit(found: Plan) -> None:
    asked = found.question
    scheduled = [candidate for candidate in found.ranked if candidate.schedule]
    assert scheduled[0] is found.best
    for candidate in scheduled:
        assert candidate.schedule
        assert check(candidate.schedule.problem, candidate.schedule) == []
        assert max(candidate.used_bytes(candidate.schedule)) <= asked.gpu.memory_bytes
        ranges = zip(candidate.used_bytes(candidate.schedule), candidate.peak_ranges(candidate.schedule), strict=True)
        assert all(least < used < most for used, (least, most) in ranges)
        if candidate.start:  # it evicts nothing
            bound = max(candidate.bound_ms, candidate.with_step_end(memory_bound(candidate.problem)))
            assert bound <= candidate.with_step_end(candidate.start.makespan_ms) * (1 + 1e-9)
    for held, ms, candidate, method in found.frontier:
        assert candidate.lengths[method] == (ms, held)
        assert held <= asked.gpu.memory_bytes
    assert found.frontier[-1][1] == found.best.iteration_ms
    assert found.lower_bound_ms <= found.best.iteration_ms


def test_activations_may_be_evicted_to_other_devices() -> None:
    """With a byte less than 1F1B needs; no search begins with what evicts, as none evicts."""

    def one_stage_a_device(memory_bytes: int) -> Candidate:
        asked = question(memory_bytes, model=SMALL.model_copy(update={"layers": 8}), gpus=8, batch=16)
        return next(c for c in candidates(asked) if c.division[1] == c.estimate.parallelism.stages == 8)

    ample = one_stage_a_device(80_000_000_000)
    tight = one_stage_a_device(max(ample.used_bytes(generate("1f1b", ample.problem))) - 1)
    found = {schedule.method: schedule for schedule in published(tight, "optpipe")}
    assert not tight.take(found["1f1b"])
    assert tight.take(found["bpipe"])
    assert tight.schedule is not None
    assert tight.start is None
    assert not tight.take(found["gpipe"])
    first = tight.schedule.problem.stages[0]
    assert first.evict_ms == tight.estimate.clock.links.message_ms(first.activation_bytes)
    assert "bpipe" not in {schedule.method for schedule in published(tight, "torch")}


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


def test_nothing_leaves_to_the_host_where_that_is_not_allowed() -> None:
    """Nor do checkpoints."""
    for offload in (True, False):
        problem = candidates(question(9 * RESERVED, offload=offload))[0].problem
        each = [*problem.stages, *(problem.layers or ())]
        assert {costs.can_offload or costs.can_offload_checkpoints for costs in each} == {offload}
        assert any(costs.can_recompute for costs in each)


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
    ("text", "assumed"),
    [
        ("pp 2, zb-h1", "tp 1, cp 1, zero 1, chunks 1, sequences 1, recompute none"),
        ("pp 2, interleaved, sequences 2", "tp 1, cp 1, zero 1, chunks 2, recompute none"),
        ("tp 2, dp 2, cp 1, zero 1, recompute full", "pp 1, sequences 1, 1f1b"),
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
        ("pp 2, zb-v, chunks 3", "zb-v is not a schedule of tp 1, pp 2"),
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


def test_a_margin_is_neither_held_nor_used() -> None:
    whole, less = (candidates(question(margin=margin)) for margin in (0.0, 0.25))
    by_name = {str(c): c for c in whole}
    memory = question().gpu.memory_bytes
    for candidate in less:
        other = by_name[str(candidate)]
        assert candidate.state_bytes == other.state_bytes
        budgets = zip(candidate.estimate.devices, other.estimate.devices, strict=True)
        assert all(b.budget - a.budget == memory - round(0.75 * memory) for a, b in budgets)


def test_torch_splits_no_backward_of_replicas_and_holds_gradients_until_w() -> None:
    plan = planned(question(9 * RESERVED, stack="torch", batch=16))
    seen = set()
    for candidate in plan.ranked:
        if candidate.schedule:
            parallelism = candidate.estimate.parallelism
            whole = parallelism.dp * parallelism.cp > 1 or candidate.estimate.run.recompute == "full"
            split = any(op.kind is Kind.W for program in candidate.schedule.programs for op in program.ops())
            seen.add((whole, split))
            problem = candidate.schedule.problem
            assert problem.stack == "torch"
            for s, stage in enumerate(problem.stages):
                factor = candidate.estimate.torch_factor if s else 1.0
                held = problem.costs.saved_for_weight[s, 0]
                assert held == pytest.approx(factor * stage.activation_bytes, rel=1e-6)
    assert (True, False) in seen
    assert (True, True) not in seen
    alone = next(c for c in candidates(question(9 * RESERVED, stack="torch")) if c.division == (1, 4, 1, 1, 1))
    tried = [alone.take(each) for each in published(alone, "torch")]
    assert any(tried)
    assert any(method.startswith("zb-") for method in alone.lengths)


def test_more_memory_is_never_slower() -> None:
    """But for a percent: list scheduling may find less in more memory."""
    sizes = [RESERVED + size for size in (3_000_000_000, 3_200_000_000, 3_500_000_000, 4_000_000_000, 9_000_000_000)]
    plans = [planned(question(size)) for size in sizes]
    iterations = [plan.best.iteration_ms for plan in plans]
    assert all(more <= 1.01 * less for less, more in pairwise(iterations))
    assert iterations[0] > 1.3 * iterations[-1]


def test_a_search_of_its_own_takes_the_place_of_what_it_beats(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of searches become smaller, and what comes to nothing changes nothing."""
    asked: list[float] = []

    def solve(problem, start, seconds):
        asked.append(seconds)

    options = SearchOptions(time_limit_s=10_000.0, gap=0.0)
    monkeypatch.setattr(PlanSearch, "_is_open", lambda self, candidate: candidate.schedule is not None)
    plan = PlanSearch(question(), solve, options, 5).run()
    rounds = [asked.count(seconds) for seconds in dict.fromkeys(asked)]
    assert rounds == [5, 2]  # with cores to spare they become smaller, too
    assert plan.searched == 5
    assert len(asked) >= plan.searched
    assert plan.best.iteration_ms == found.best.iteration_ms


def test_parts_add_up(found: Plan) -> None:
    for candidate in (found.best, *found.other_divisions):
        divided = candidate.parts_ms
        assert sum(divided.values()) == pytest.approx(candidate.least_ms)
        assert min(divided.values()) > -1e-6 * candidate.least_ms
    assert {c.division for c in found.other_divisions}.isdisjoint({found.best.division})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 7}, "batch = 8: 7 GPUs make 7 replicas of the model, a multiple of 7 sequences would be right"),
        ({"gpus": 8191}, "gpus = 8191: cannot be divided into stages of 6 layers"),
        (
            {"gpus": 64, "batch": 9, "run": Run(microbatches=1, attention="unfused")},
            "batch = 9: 64 GPUs make 8 or 16 or 32 or 64 replicas",
        ),
        (
            {"gpu": GPUS["A100"].model_copy(update={"memory_bytes": RESERVED + 10**9, "gpus_per_node": 2})},
            "no division fits: with tp 2, pp 2, dp 1, .* a GPU needs 7.3 GB for one micro-batch at a time, 7.0 of it "
            "without any activation, and has 5.3",
        ),
        ({"model": SMALL.model_copy(update={"sequence": None})}, "sequence is missing"),
    ],
)
def test_what_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        planned(question(**fields))
    assert "\n" not in str(error.value)


def test_what_is_told_to_be_nearest_misses_by_least() -> None:
    """Long sequences: the division with the smallest state needs the most for activations."""
    model = SMALL.model_copy(update={"sequence": 2**17, "vocabulary": 1000})
    asked = question(RESERVED + 10**8, model=model, stack="megatron")
    needed = {str(c): (c.needed_bytes, c.state_bytes) for c in candidates(asked)}
    least, state = min(needed.values())
    assert state > min(state for _, state in needed.values())
    with pytest.raises(InputError) as told:
        planned(asked)
    (nearest,) = (name for name in needed if f"with {name}, a GPU needs {least / 1e9:.1f} GB" in str(told.value))
    assert needed[nearest][0] == least


def test_a_stack_whose_schedules_do_not_fit_is_told() -> None:
    model = MODELS["llama-3-8b"].model_copy(update={"layers": 4, "vocabulary": 1000, "sequence": 65535})
    gpu = GPUS["H100"].model_copy(update={"memory_bytes": 26_600_000_000, "gpus_per_node": 1})
    with pytest.raises(InputError, match=r"one micro-batch fits, but no schedule that megatron has"):
        planned(question(model=model, gpu=gpu, batch=7, stack="megatron"))


def test_too_little_time_is_said() -> None:
    options = SearchOptions(time_limit_s=1e-6)
    with pytest.raises(InputError, match="a longer time would be right"):
        PlanSearch(question(RESERVED + 3_000_000_000), lambda *_: None, options, 1).run()


def test_other_stacks_run_what_they_have() -> None:
    megatron = planned(question(stack="megatron"))
    assert {method for c in megatron.ranked for method in c.lengths} <= {"1f1b", "interleaved"}
    assert megatron.counts.left_open == 0
    assert megatron.best.iteration_ms == pytest.approx(everything(question(stack="megatron")), rel=1e-9)
    assert {c.estimate.parallelism.shape for c in megatron.ranked} == {"looped"}
    torch = planned(question(stack="torch"))
    assert torch.best.schedule
    assert export_schedule(torch.best.schedule, "torch-csv")
    assert {c.estimate.run.recompute for c in torch.ranked} == {"none", "full"}
    ample = [planned(question(10 * RESERVED, stack=stack)).best.iteration_ms for stack in ("torch", "megatron")]
    assert ample[0] <= ample[1]  # where torch's buffers do not matter


def test_torch_has_no_pipeline_for_tied_models() -> None:
    tied = SMALL.model_copy(update={"tied": True, "name": "small"})
    plan = planned(question(9 * RESERVED, model=tied, stack="torch"))
    assert {c.estimate.parallelism.pp for c in plan.ranked} == {1}
    with pytest.raises(InputError, match=r"a GPU needs .*; embedding and head of small are tied, which torchtitan"):
        planned(question(RESERVED + 10**9, model=tied, stack="torch"))
    assert any(c.estimate.parallelism.pp > 1 for c in candidates(question(model=tied, stack="megatron")))


def test_plans_are_equal_within_what_is_not_known(found: Plan) -> None:
    """What both depend on in the same way does not count; better known parameters tell more of them apart."""
    best, other = found.best, found.other_divisions[0]
    itself = difference(best, best)
    gpu = best.estimate.gpu
    assert itself.longer == 0
    assert itself.spread == pytest.approx(2**0.5 * gpu.unexplained)
    assert itself.largest == UNEXPLAINED
    vague = difference(best, other)
    assert vague.spread >= itself.spread
    assert sum(vague.variance.values()) == pytest.approx(1)
    sure = gpu.model_copy(update={"covariance": [[0.0] * len(NAMES)] * len(NAMES), "unexplained": 1e-6})
    known = difference(replace(best, estimate=best.estimate.on(sure)), other)
    assert known.longer == pytest.approx(vague.longer)
    assert not known.is_open
    assert difference(best, other)._replace(spread=2 * abs(vague.longer)).is_open


def test_gradients_are_reduced_over_replicas() -> None:
    """2(n - 1)/n of the bytes, over all network cards of a node as every replica is one of its GPUs."""
    divided = {c.division: c.estimate for c in candidates(question()) if c.estimate.parallelism.zero < 2}
    assert divided[2, 2, 1, 1, 1].reduction_ms == 0
    made = divided[1, 1, 4, 1, 1]
    weights = made.parameters
    speed = made.gpu.gpus_per_node * made.gpu.network_bytes_per_s * made.gpu.network_fraction
    steps_ms = 2 * 3 * made.gpu.link_us / 1000
    assert made.reduction_ms == pytest.approx(3 / 4 * 6 * weights / speed * 1000 + steps_ms)


def test_divisions_are_whole() -> None:
    for candidate in candidates(question()):
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        assert parallelism.gpus == 4
        assert parallelism.tp <= 2
        assert run.microbatches * run.microbatch_size * parallelism.dp == 8
        assert sum(parallelism.layers or (6,)) == 6


def test_experts_are_divided_over_replicas() -> None:
    asked = question(model=MODELS["mixtral-8x7b"], gpus=8, gpu=GPUS["H200"])
    divisions = {c.division for c in candidates(asked)}
    assert {ep for _, _, dp, ep, _ in divisions if dp == 8} == {1, 2, 4, 8}
    for stack in ("megatron", "torch"):
        every = candidates(asked.model_copy(update={"stack": stack}))
        found = {(c.division[0], c.division[2], c.division[3], c.estimate.parallelism.etp) for c in every}
        assert (2, 4, 8, 1) in found  # undivided experts over all GPUs of a stage
        assert ((2, 4, 4, None) in found) == (stack == "megatron")  # torch divides no expert


def test_context_parallelism_divides_what_replicas_cannot() -> None:
    """Sequences of flash attention, into two halves a GPU; with fewer sequences than GPUs it takes all of them."""
    few = {c.estimate.parallelism.cp for c in candidates(question(batch=1))}
    assert few == {1, 2, 4}
    odd = question(model=SMALL.model_copy(update={"sequence": 1026}))
    unfused = question(run=Run(microbatches=1, attention="unfused"))
    assert {c.estimate.parallelism.cp for asked in (odd, unfused) for c in candidates(asked)} == {1}
    for candidate in candidates(question()):
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        assert parallelism.cp == 1 or run.microbatch_size == 1  # else replicas send less


def test_zero_is_what_the_stack_has() -> None:
    for stack, stages in (("optpipe", {0, 1, 2}), ("torch", {0, 1, 3}), ("megatron", {0, 1})):
        assert {c.estimate.parallelism.zero for c in candidates(question(stack=stack))} == stages
    titan = next(c for c in candidates(question(stack="torch")) if c.estimate.parallelism.zero == 3)
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
    candidate = next(c for c in candidates(asked) if c.state_bytes < asked.gpu.memory_bytes)
    assert not any(stage.can_offload for stage in candidate.problem.stages)


def placed(**changes: object) -> Candidate:
    (found, *_) = (
        c
        for c in candidates(question())
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
        c.estimate.run.microbatches >= c.estimate.parallelism.pp for c in candidates(question(batch=4, stack="torch"))
    )


@pytest.mark.parametrize("stack", ["torch", "megatron"])
def test_other_stacks_divide_sequences_evenly(stack: str) -> None:
    odd = question(model=SMALL.model_copy(update={"sequence": 2050}), stack=stack)
    divisions = {(c.division[0], c.division[4]) for c in candidates(odd)}
    assert divisions == {(1, 1), (2, 1)}  # tp and cp: 4 divides no 2050, of tp 2 and cp 2 there are 8 parts


def test_megatron_is_asked_for_no_groups_that_it_does_not_have() -> None:
    """Of 10 micro-batches in groups of 4 it would leave 2 for the last one, fewer than ranks; ours are 4, 3 and 3."""
    candidate = next(
        c
        for c in candidates(question(batch=10, stack="megatron", gpus=3, gpu=GPUS["B200"]))
        if (c.estimate.parallelism.pp, c.estimate.parallelism.chunks, c.estimate.run.microbatches) == (3, 2, 10)
    )
    assert [schedule.method for schedule in published(candidate, "optpipe") if schedule.method == "interleaved"]
    assert not list(published(candidate, "megatron"))
