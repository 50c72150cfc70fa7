"""Schedules in Megatron-core: two steps have the losses and gradients of Megatron's own functions, and hold no more
than is certified. With parameters in float64, and to the bit where gradients are summed in the same order.

`make stacks` runs it in an environment with the package.
"""

import re
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, make_dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems, tables
from support.examples import examples
from support.layouts import RECIPES
from support.problems.published import Case, published
from support.ranks import cases, megatron
from support.ranks.megatron import require_same, systems_of, together
from support.ranks.megatron_model import A2A, BIAS, EXPERTS, MICROBATCHES, Division
from support.ranks.worker import Ranks

from optpipe import InputError
from optpipe.formats import megatron as form
from optpipe.model.ops import OPTIMIZER, Kind, Pair
from optpipe.model.placement import Placement
from optpipe.model.records import Stage
from optpipe_solver import heuristics, systems

pytestmark = pytest.mark.stacks
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NOT_COMPARED = "with it, losses and gradients have not been compared with Megatron's own"
WARNS = pytest.mark.filterwarnings("ignore")  # its import tells what it lacks on this machine


def runnable(found: list[Case]) -> list[Case]:
    """Those of one route, with as many stages on each rank, and no optimizer on the host."""
    alike = [case for case in found if len(set(map(case.layout.placement.count, case.layout.placement))) == 1]
    return [case for case in alike if len(case.layout.routes) == 1 and not case.kinds & OPTIMIZER]


def with_times(stage: Stage, other: Stage) -> Stage:
    """A stage with the bytes that were measured, and times that no busy machine changes."""
    return other.model_copy(update={name: getattr(stage, name) for name in Stage.model_fields if "bytes" in name})


@pytest.mark.filterwarnings("ignore")  # of what its import lacks here
@settings(deadline=None, max_examples=examples(300))
@given(text=st.one_of(st.sampled_from([*RECIPES]), st.text("EtmL|()*,23", max_size=12)), ranks=st.integers(1, 8))
def test_layouts_are_read_as_megatron_reads_them(text: str, ranks: int) -> None:
    """Of any text the same stages, or both refuse it; and what we put on ranks, Megatron puts there, too."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        with pytest.raises(InputError):
            form.read_layout(text)
        return
    assert form.read_layout(text) == ["".join(letters[layer.name] for layer in stage) for stage in theirs]
    with suppress(InputError):
        layers, modules = form.read_stages({"layout": text}, ranks)
        read = PipelineParallelLayerLayout(text, ranks)
        read.validate_layer_layout(sum(layers), sum(modules))
        by_rank = [[[layer.name for layer in stage].count("decoder") for stage in rank] for rank in read.layout]
        assert by_rank == [layers[rank::ranks] for rank in range(ranks)]


ENDS = st.one_of(
    st.dictionaries(st.sampled_from(("first", "last")), st.integers(0, 6), min_size=1),
    st.dictionaries(st.sampled_from(("embedding", "loss")), st.just(1), min_size=1),
)


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=examples(300))
@given(layers=st.integers(1, 24), ranks=st.integers(2, 5), chunks=st.integers(1, 3), ends=ENDS)
def test_uneven_stages_are_those_of_megatron(layers: int, ranks: int, chunks: int, ends: dict[str, int]) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=None,
        **{f"num_layers_in_{end}_pipeline_stage": ends.get(end) for end in ("first", "last")},
        **{f"account_for_{end}_in_pipeline_split": end in ends for end in ("embedding", "loss")},
    )
    theirs = []
    with suppress(AssertionError):
        theirs = [
            get_num_layers_to_build(config, chunk if chunks > 1 else None, rank)
            for chunk in range(chunks)
            for rank in range(ranks)
        ]
    if sum(theirs) == layers and min(theirs) >= 0:
        assert form.uneven_layers(layers, ranks, chunks, ends) == theirs
    else:
        with pytest.raises(InputError, match=f"equal shares of {layers} layers"):
            form.uneven_layers(layers, ranks, chunks, ends)


def test_every_published_schedule_has_the_losses_and_gradients_of_megatrons_own(ranks: Ranks) -> None:
    found = runnable(published(ranks.world, (MICROBATCHES,)))
    assert {"1f1b", "zb-h1", "interleaved", "zb-v", "adaoffload", "1f1b-recompute"} <= {case.name for case in found}
    by_rank = ranks(megatron.ours, timeout=3000, schedules=[case.schedule for case in found])
    plain = {
        n: together(ranks(megatron.plain, stages=n)[:1]) for n in {len(case.schedule.problem.stages) for case in found}
    }
    for placement in ((0, 1), (0, 1, 0, 1)):
        outcomes = ranks(megatron.theirs, placement=placement)
        require_same(f"Megatron's own on {placement}", outcomes, plain[len(placement)])
    for case, *outcomes in zip(found, *by_rank, strict=True):
        difference = require_same(case.name, outcomes, plain[len(case.schedule.problem.stages)])
        tables.note(case.name, ranks.world, "forward_backward_func", difference)


def test_scripts_get_it_wherever_they_take_the_function_from(ranks: Ranks) -> None:
    (schedule,) = systems_of("zb-h1")
    taken, outcomes = zip(*ranks.to_the_end(megatron.in_scripts, schedule=schedule), strict=True)
    assert all(map(all, taken))
    require_same("zb-h1", list(outcomes), together(ranks(megatron.plain, stages=2)[:1]))


@pytest.mark.parametrize(("placement", "activations"), [((0, 1), 1.8), ((0, 1, 1, 0), 1.5)])
def test_peaks_are_as_certified_on_the_problem_that_it_profiles(
    placement: tuple[int, ...], activations: float, ranks: Ranks
) -> None:
    ample = cases.problem(placement, MICROBATCHES, offload_parts=2)
    keeping = heuristics.generate("adaoffload", ample)
    (measured, one), (other, two) = ranks(megatron.profiled, schedule=keeping, budget_bytes=10**8)
    assert measured == other
    real = measured.replace(stages=[with_times(*both) for both in zip(measured.stages, ample.stages, strict=True)])
    tight = real.with_memory_for(activations)
    schedules = {name: heuristics.generate("adaoffload", p) for name, p in (("ample", real), ("tight", tight))}
    by_rank = ranks(megatron.ours, timeout=600, schedules=list(schedules.values()))
    plain = together(ranks(megatron.plain, stages=len(placement))[:1])
    assert (one or two) == plain.losses, "what the profile has read was the step's"
    for name, *outcomes in zip(schedules, *by_rank, strict=True):
        difference = require_same(name, outcomes, plain, tolerance=1e-12)  # sums may come in another order
        share = max(done.peak_bytes / done.certified_bytes for done in outcomes)
        tables.note(f"{name} on {placement}", ranks.world, "forward_backward_func", difference, share)
        assert 0 < share <= 1
    kept, left = zip(*by_rank, strict=True)
    assert [done.host_peak_bytes for done in kept] == [0, 0]
    assert left[0].host_peak_bytes > 0
    assert left[0].peak_bytes < kept[0].peak_bytes


@pytest.mark.parametrize(("per_token", "in_bfloat16"), [(False, False), (True, False), (False, True)])
def test_gradient_buffers_and_token_counts_are_megatrons(per_token: bool, in_bfloat16: bool, ranks: Ranks) -> None:
    """In Megatron's DistributedDataParallel, finished by its `finalize_model_grads`; with a whole and a split
    backward."""
    schedules = systems_of("1f1b", "zb-h1")
    how = {"in_ddp": True, "per_token": per_token, "in_bfloat16": in_bfloat16}
    theirs = ranks(megatron.theirs, placement=(0, 1), **how)
    by_rank = ranks(megatron.ours, schedules=schedules, **how)
    for schedule, *outcomes in zip(schedules, *by_rank, strict=True):
        require_same(schedule.method or "", outcomes, together(theirs))
        assert [done.tokens for done in outcomes] == [done.tokens for done in theirs]
    assert (theirs[1].tokens is not None) == per_token


@pytest.mark.parametrize("per_token", [False, True])
def test_auxiliary_losses_of_experts_have_megatrons_scale(per_token: bool, ranks: Ranks) -> None:
    schedules = systems_of("1f1b", "zb-h1", "1f1b-recompute")
    how = {"options": EXPERTS, "per_token": per_token}
    theirs = together(ranks(megatron.theirs, placement=(0, 1), **how))
    for schedule, *outcomes in zip(schedules, *ranks(megatron.ours, schedules=schedules, **how), strict=True):
        require_same(schedule.method or "", outcomes, theirs, tolerance=1e-12)


ATTENTION = {"recompute_granularity": "selective"}


@pytest.mark.parametrize("recomputing", [{}, LAYERS, ATTENTION], ids=["nothing", "layers", "attention"])
def test_dropout_is_megatrons_and_a_recomputation_has_that_of_its_forward(
    recomputing: dict[str, Any], ranks: Ranks
) -> None:
    """Megatron has random numbers of its own for attention, and torch's for the rest. It may itself recompute parts."""
    schedules = systems_of("1f1b", "zb-h1", "1f1b-recompute")
    options = {"hidden_dropout": 0.2, "attention_dropout": 0.2} | recomputing
    theirs = together(ranks(megatron.theirs, placement=(0, 1), options=options))
    for schedule, *outcomes in zip(schedules, *ranks(megatron.ours, schedules=schedules, options=options), strict=True):
        require_same(schedule.method or "", outcomes, theirs, tolerance=1e-12)


def test_sequences_may_have_different_lengths(ranks: Ranks) -> None:
    """With `variable_seq_lengths`, as Megatron's own functions."""
    schedules = systems_of("1f1b", "zb-h1", "1f1b-recompute")
    plain = together(ranks(megatron.plain, stages=2, different=True)[:1])
    require_same("Megatron's own", ranks(megatron.theirs, placement=(0, 1), different=True), plain)
    for schedule, *outcomes in zip(schedules, *ranks(megatron.ours, schedules=schedules, different=True), strict=True):
        require_same(schedule.method or "", outcomes, plain)


def test_a_profile_leaves_gradient_buffers_as_they_are(ranks: Ranks) -> None:
    (schedule,) = systems_of("zb-h1")
    assert ranks(megatron.profiled_in_ddp, schedule=schedule) == [[], []]


DIVIDED: dict[str, dict[str, Any]] = {
    "replicas": {},
    "replicas that predict a further token": {"options": {"mtp_num_layers": 1}},
    "replicas with a distributed optimizer": {"sharded": True},
    "tensors": {"division": Division(tensor=2)},
    "tensors and tokens": {"division": Division(tensor=2), "options": {"sequence_parallel": True}},
    "sequences": {"division": Division(context=2)},
    "sequences, by token": {"division": Division(context=2), "per_token": True},
    "experts": {"division": Division(expert=2), "options": A2A | BIAS},
    "experts, recomputed by Megatron": {"division": Division(expert=2), "options": A2A | BIAS | LAYERS},
    "experts, by token": {"division": Division(expert=2), "options": A2A, "per_token": True, "sharded": True},
    "experts, of other lengths": {"division": Division(expert=2), "options": A2A, "different": True},
    "tensors and experts": {"division": Division(2, 1, 2), "options": A2A | {"sequence_parallel": True}},
    "sequences and experts": {"division": Division(1, 2, 2), "options": A2A},
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_replicas_and_stages_that_ranks_share(kind: str, four_ranks: Ranks) -> None:
    """Two replicas of a pipeline, which get other batches; or one whose stages two ranks compute together."""
    schedules, how = systems_of("1f1b", "zb-h1", "1f1b-recompute"), DIVIDED[kind] | {"in_ddp": True}
    theirs = four_ranks(megatron.theirs, placement=(0, 1), **how)
    found = four_ranks(megatron.ours, schedules=schedules, **how)
    for outcomes, expected in zip(found, theirs, strict=True):
        for schedule, own in zip(schedules, outcomes, strict=True):
            require_same(f"{schedule.method}, {kind}", [own], expected, tolerance=1e-12)
            assert own.tokens == expected.tokens
    assert (theirs[2].losses == theirs[3].losses) == ("tensors" in kind)


def test_evaluations_have_no_gradients(ranks: Ranks) -> None:
    (schedule,) = systems_of("zb-h1")
    (none, *_), (losses, collected, _) = found = ranks(megatron.evaluated, schedule=schedule)
    assert none == []
    assert len(losses) == len(collected) == MICROBATCHES
    for *_, with_gradient in found:
        before, trained, after = with_gradient
        assert before == 0 < trained == after


def test_what_it_cannot_do_is_refused(ranks: Ranks) -> None:
    (schedule,) = systems_of("1f1b")
    configs = [("fine_grained_activation_offloading", True), ("fp8", "hybrid"), ("moe_token_dispatcher_type", "flex")]
    arguments = [("num_microbatches", 4), ("adjust_tensor_shapes_fn", print), ("data_iterator", [])]
    for sentences in ranks(megatron.refusals, schedule=schedule, configs=configs, arguments=arguments):
        assert sentences == [
            "config.fine_grained_activation_offloading = True: the schedule says what is offloaded, so leave it at "
            "False",
            f"config.fp8 = 'hybrid': {NOT_COMPARED}, so leave it at None",
            "config.moe_token_dispatcher_type = 'flex': one of allgather, alltoall is expected; "
            f"{NOT_COMPARED}, so leave it at 'allgather'",
            "num_microbatches = 4: the schedule is for 6",
            "adjust_tensor_shapes_fn is given: shapes are learned from the stages, leave it out",
            "data_iterator has 0 iterators: each of 1 chunks needs one",
        ]


def test_embeddings_that_megatron_ties_are_refused_where_it_ties_other_ranks(ranks: Ranks) -> None:
    schedule = systems.generate("zb-v", cases.problem((0, 1, 1, 0), MICROBATCHES))
    for sentences in ranks(megatron.refusals, schedule=schedule, configs=[("mtp_num_layers", 1)], arguments=[]):
        assert sentences == [
            "share_embeddings_and_output_weights or mtp_num_layers: Megatron ties rank 0 with rank 1; the schedule has "
            "its first stage on rank 0, its last one on rank 0"
        ]


def test_what_one_rank_cannot_do_is_refused_on_all(ranks: Ranks) -> None:
    (schedule,) = systems_of("1f1b")
    told, own = ranks(megatron.refusals_of_one, schedule=schedule, rank=1)
    assert own == [
        "model has 2 chunks on rank 1 of 2: the schedule places 1 there, on 2 ranks",
        "the chunk of stage 1 has pre_process=True: in this schedule it must be False",
    ]
    assert told == [f"rank 1: {sentence}" for sentence in own]


def test_what_one_rank_refuses_in_a_later_step_ends_it_on_all(ranks: Ranks) -> None:
    (schedule,) = systems_of("1f1b")
    told, own = ranks.to_the_end(megatron.refused_later, schedule=schedule, rank=1)
    assert own == "data_iterator has 2 iterators: each of 1 chunks needs one"
    assert "rank 0 lost its connection" in told


def test_models_and_groups_end_with_their_training(ranks: Ranks) -> None:
    """In Megatron's DistributedDataParallel, which refers to groups. Each gloo group has threads, by the thousand they
    keep a machine busy."""
    (schedule,) = systems_of("zb-h1")
    assert ranks(megatron.threads_left, schedule=schedule) == [0, 0]


def megatrons_configs() -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "tensor_model_parallel_size": 2}
    return [TransformerConfig(**sizes), MLATransformerConfig(**sizes), DistributedDataParallelConfig()]


@WARNS
def test_every_option_of_the_installed_version_is_accepted_or_refused_by_name() -> None:
    from optpipe_runtime.megatron.options import ACCEPTED, REFUSED, VALUES, require_supported

    for config in megatrons_configs():
        require_supported(config, "config")
        for name in [field.name for field in fields(config)]:
            assert [name in known for known in (ACCEPTED, REFUSED, VALUES)].count(True) == 1, name
            tried = [(value, None) for value in VALUES[name]] + [("x", NOT_COMPARED)] if name in VALUES else []
            for value, why in tried or [(3, REFUSED.get(name))]:
                with mock.patch.object(config, name, value), refusing(name, value, why):
                    require_supported(config, "config")


def refusing(name: str, value: Any, why: str | None) -> AbstractContextManager[object]:
    """Around what must be refused with this reason; None: must not be."""
    text = rf"^config\.{name} = {value!r}: .*{re.escape(why or '')}, so leave it at "
    return nullcontext() if why is None else pytest.raises(InputError, match=text)


@WARNS
def test_an_option_that_nobody_has_looked_at_is_refused_and_a_class_of_your_own_is_not() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from optpipe_runtime.megatron.options import require_supported

    new = [("dynamic_context_parallel", bool, False), ("sequence_packing_scheduler", str | None, None)]
    later = make_dataclass("Later", new, bases=(TransformerConfig,), namespace={"__module__": "megatron.core.later"})
    yours = make_dataclass(
        "Yours", [("vocab", int, 64), ("fp8", str, "hybrid"), ("normalization", str, "RMSNorm")], bases=(later,)
    )
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    require_supported(later(**sizes), "config")
    require_supported(yours(**sizes, fp8=None, vocab=128), "config")
    for name, value in (("dynamic_context_parallel", True), ("sequence_packing_scheduler", "dp_balanced")):
        with refusing(name, value, "what it does to a schedule is not known"):
            require_supported(yours(**sizes, fp8=None, **{name: value}), "config")
    with refusing("fp8", "hybrid", NOT_COMPARED):
        require_supported(yours(**sizes), "config")


@WARNS
@pytest.mark.parametrize(("p", "chunks", "m", "group"), [(4, 1, 8, 1), (4, 1, 2, 1), (2, 2, 8, 2), (3, 3, 10, 4)])
def test_its_own_order_is_what_the_export_compares_with(p: int, chunks: int, m: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    for rank, ops in enumerate(form.order(p, chunks, form.in_groups(m, group))):
        groups = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: p, rank=lambda: rank),  # noqa: B023
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        *_, warm_up, _ = get_pp_rank_microbatches(m, chunks, group, p2p_communicator=groups)
        table = get_schedule_table(m, chunks, m if chunks == 1 else group)
        kinds = {kind: [(op.microbatch, op.stage // p) for op in ops if op.kind == kind] for kind in (Kind.F, Kind.BW)}
        assert kinds == {Kind.F: table, Kind.BW: [(j, chunks - 1 - chunk) for j, chunk in table]}
        steady = [Kind.F, Kind.BW] * (len(table) - warm_up)
        assert [op.kind for op in ops] == [Kind.F] * warm_up + steady + [Kind.BW] * warm_up
        if chunks > 1:
            *_, alone, left = get_pp_rank_microbatches(
                m, chunks, group, overlap_moe_expert_parallel_comm=True, p2p_communicator=groups
            )
            beside = form.combined_order(p, chunks, form.in_groups(m, group))[rank]
            forwards, backwards = ([op for op in ops if op.kind == kind] for kind in kinds)
            pairs = [Pair(forwards[alone + k], backwards[k]) for k in range(left)]  # as its loop in the steady state
            assert beside == [*forwards[:alone], *pairs, *backwards[left:]]


@WARNS
def test_it_reads_the_layout() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layers = [problems.stage((n, n, n)) for n in (1, 4, 4, 4, 4, 8)]
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=layers)
    text = form.layout_of_counts(form.layer_counts(Placement(chunks=2, layers=(3, 1, 1, 1)).apply(row)))
    read = PipelineParallelLayerLayout(text, pipeline_model_parallel_size=2)
    read.validate_layer_layout(num_layers=4, mtp_num_layers=0)
    assert [[len(chunk) for chunk in rank] for rank in read.layout] == [[3, 1], [1, 1]]
