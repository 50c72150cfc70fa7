"""Schedules in Megatron-core: two steps have the losses and gradients of Megatron's own functions, and hold no more
than is certified. With parameters in float64, and to the bit where gradients are summed in the same order.

`make stacks` runs it in an environment with the package.
"""

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems, tables
from support.examples import examples
from support.layouts import RECIPES
from support.problems.published import Case, published
from support.ranks import cases, megatron
from support.ranks.megatron import Outcome
from support.ranks.worker import Ranks

from optpipe import InputError
from optpipe.formats import megatron as form
from optpipe.model.ops import OPTIMIZER, Kind, Pair
from optpipe.model.placement import Placement
from optpipe.model.records import Stage
from optpipe.schedule import Schedule
from optpipe_solver import heuristics, systems

pytestmark = pytest.mark.stacks
WARNS = pytest.mark.filterwarnings("ignore")  # its import tells what it lacks on this machine


def systems_of(*names: str) -> list[Schedule]:
    return [systems.generate(name, cases.problem((0, 1), megatron.MICROBATCHES)) for name in names]


def runnable(found: list[Case]) -> list[Case]:
    """Those of one route, with as many stages on each rank, and no optimizer on the host."""
    alike = [case for case in found if len(set(map(case.layout.placement.count, case.layout.placement))) == 1]
    return [case for case in alike if len(case.layout.routes) == 1 and not case.kinds & OPTIMIZER]


def together(outcomes: list[Outcome]) -> Outcome:
    """What all ranks have found."""
    losses = next((outcome.losses for outcome in outcomes if outcome.losses), [])
    return Outcome(losses, {name: grad for outcome in outcomes for name, grad in outcome.gradients.items()})


def require_same(what: str, outcomes: list[Outcome], expected: Outcome, tolerance: float = 0.0) -> float:
    """Fails unless losses are those expected, and gradients are, too; the largest difference of a loss."""
    found = together(outcomes)
    assert found.gradients.keys() == expected.gradients.keys(), what
    for name, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, expected.gradients[name], tolerance, tolerance, err_msg=f"{what}, {name}")
    assert found.losses == expected.losses, what
    return max((abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)), default=0.0)


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


def test_every_published_schedule_has_the_losses_and_gradients_of_megatrons_own(ranks: Ranks) -> None:
    found = runnable(published(ranks.world, (megatron.MICROBATCHES,)))
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


@pytest.mark.parametrize(("placement", "activations"), [((0, 1), 1.8), ((0, 1, 1, 0), 1.5)])
def test_peaks_are_as_certified_on_the_problem_that_it_profiles(
    placement: tuple[int, ...], activations: float, ranks: Ranks
) -> None:
    ample = cases.problem(placement, megatron.MICROBATCHES, offload_parts=2)
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
    how = {"experts": True, "per_token": per_token}
    theirs = together(ranks(megatron.theirs, placement=(0, 1), **how))
    for schedule, *outcomes in zip(schedules, *ranks(megatron.ours, schedules=schedules, **how), strict=True):
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


@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_and_tensor_parallel_stages(tensor: int, four_ranks: Ranks) -> None:
    """Two replicas of a pipeline, which get other batches; or one whose linear layers two ranks share."""
    (schedule,) = systems_of("zb-h1")
    theirs = four_ranks(megatron.theirs, placement=(0, 1), tensor=tensor, in_ddp=True)
    found = four_ranks(megatron.ours, schedules=[schedule], tensor=tensor, in_ddp=True)
    for (own,), expected in zip(found, theirs, strict=True):
        assert own.losses == expected.losses
        require_same(f"tensor={tensor}", [own], expected, tolerance=1e-12)
    assert (theirs[2].losses == theirs[3].losses) == (tensor == 2)


def test_evaluations_have_no_gradients(ranks: Ranks) -> None:
    (schedule,) = systems_of("zb-h1")
    (none, *_), (losses, collected, _) = found = ranks(megatron.evaluated, schedule=schedule)
    assert none == []
    assert len(losses) == len(collected) == megatron.MICROBATCHES
    for *_, with_gradient in found:
        before, trained, after = with_gradient
        assert before == 0 < trained == after


def test_what_it_cannot_do_is_refused(ranks: Ranks) -> None:
    (schedule,) = systems_of("1f1b")
    on, experts = ("fine_grained_activation_offloading", "enable_autocast"), "expert_model_parallel_size"
    configs = [*((name, True) for name in on), (experts, 2)]
    arguments = [("num_microbatches", 4), ("adjust_tensor_shapes_fn", print), ("data_iterator", [])]
    for sentences in ranks(megatron.refusals, schedule=schedule, configs=configs, arguments=arguments):
        assert sentences == [
            "config.fine_grained_activation_offloading = True: the schedule says what is offloaded, so leave it off",
            "config.enable_autocast = True: linear layers compute in the type of their parameters, so leave it off",
            "config.expert_model_parallel_size = 2: it must be 1",
            "num_microbatches = 4: the schedule is for 6",
            "adjust_tensor_shapes_fn is given: shapes are learned from the stages, leave it out",
            "data_iterator has 0 iterators: each of 1 chunks needs one",
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


def test_groups_end_with_their_test(ranks: Ranks) -> None:
    """A gloo group has threads, which keep a machine busy by the thousand."""
    (schedule,) = systems_of("zb-h1")
    assert ranks(megatron.groups_left, schedule=schedule) == [0, 0]


@WARNS
@pytest.mark.parametrize(("p", "chunks", "m", "group"), [(4, 1, 8, 1), (4, 1, 2, 1), (2, 2, 8, 2), (3, 3, 10, 4)])
def test_its_own_order_is_what_the_export_compares_with(p: int, chunks: int, m: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    for rank, ops in enumerate(form.order(p, chunks, m, group)):
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
            beside = form.combined_order(p, chunks, m, group)[rank]
            forwards, backwards = ([op for op in ops if op.kind == kind] for kind in kinds)
            pairs = [Pair(forwards[alone + k], backwards[k]) for k in range(left)]  # as its loop in the steady state
            assert beside == [*forwards[:alone], *pairs, *backwards[left:]]


@WARNS
def test_it_reads_the_layout() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layers = [problems.stage((n, n, n)) for n in (1, 4, 4, 4, 4, 8)]
    row = problems.pipeline(2, 4, 10**9, problems.stage(), layers=layers)
    text = form.layout(Placement(chunks=2, layers=(3, 1, 1, 1)).apply(row))
    read = PipelineParallelLayerLayout(text, pipeline_model_parallel_size=2)
    read.validate_layer_layout(num_layers=4, mtp_num_layers=0)
    assert [[len(chunk) for chunk in rank] for rank in read.layout] == [[3, 1], [1, 1]]
