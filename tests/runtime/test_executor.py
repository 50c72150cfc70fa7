"""Two ranks run schedules on a real model: losses and gradients are those of a plain run, bit by bit if sums have the
same order. With evictions the bytes really move to the other rank. Also where micro-batches pass the stages in
different orders, or different stages."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks.cases import LENGTH, WIDTH, Block, Gradients, measured, numbers, own, same, train_as_plain
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.errors import ScheduleError
from optpipe.model.ops import COMPUTE, Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_runtime import Layout, Pipeline, prepare
from optpipe_runtime.features.evictions import require_peers

PEERS = [(None, None), (1, None), (1, 0)]
WHERE = [((0, 0), (None, None)), *product([(0, 1), (0, 1, 1, 0), (1, 0, 1)], PEERS)]


@settings(max_examples=examples(80))
@given(st.data(), st.sampled_from(WHERE))
def test_any_valid_schedule_gives_the_same_sums_in_the_bytes_that_are_certified(
    ranks: Ranks, data: Any, where: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> None:
    """On the problem that is measured, with evictions where a rank has a peer."""
    schedule = data.draw(schedules(measured(ranks, *where)))
    certified = certify(schedule.problem, schedule).device
    for rank, (report,) in enumerate(train_as_plain(ranks, [schedule], exact=False)):
        assert report.excess is None
        assert all(0 <= time.held_bytes <= time.certified_bytes for time in report.trace)
        if report.trace:
            assert max(time.held_bytes for time in report.trace) == report.peak_activation_bytes
            assert report.trace[-1].held_bytes == 0
            assert 0.3 * certified[rank].bytes < report.peak_activation_bytes <= certified[rank].bytes


def test_tied_embeddings_get_the_sum_of_both_gradients(ranks: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), ONE_F_ONE_B)
    (first, whole), (last, _) = ranks(cases.tied, placement=[0, 1], schedule=schedule)
    for step in range(2):
        np.testing.assert_array_equal(first[step]["tied"], last[step]["tied"])
    np.testing.assert_allclose(first[1]["tied"], whole["tied"], rtol=1e-4, atol=1e-7)


def test_the_trace_has_every_op_in_order(ranks: Ranks) -> None:
    for rank, (report,) in enumerate(same(ranks, [0, 1], [OFFLOADED])):
        assert [str(time.op) for time in report.trace] == OFFLOADED[rank]
        ended = {str(time.op): time.end_ms for time in report.trace}
        assert all(0 <= time.start_ms <= time.end_ms <= report.step_ms for time in report.trace)
        assert ended[f"{rank}O0"] <= ended[f"{rank}D0"] <= ended[f"{rank}R0"]
        compute = [time for time in report.trace if time.op.kind in COMPUTE]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(compute))


def test_an_output_that_no_later_stage_uses_gets_no_gradient(ranks: Ranks) -> None:
    """None as in a plain run, not zeros, which an optimizer with momentum or weight decay would take for a gradient."""
    placement = [0, 1, 0]
    programs = [
        ["0F0", "0F1", "2F0", "2BW0", "2F1", "0B0", "2B1", "0W0", "2W1", "0BW1"],
        ["1F0", "1F1", "1B0", "1W0", "1BW1"],
    ]
    results = ranks(
        cases.with_branches, placement=placement, schedule=Schedule.parse(cases.problem(placement, 2), programs)
    )
    modules = cases.branches()
    for _ in range(2):
        x: Any = (torch.ones(2, cases.WIDTH),)
        for module in modules:
            x = module(*x)
        torch.autograd.backward(cases.first_of(x, torch.zeros(2, cases.WIDTH)) / 2)
    plain = cases.numbers(dict(enumerate(modules)))
    assert plain.keys() == {f"{s}.layers.0.{name}" for s in range(3) for name in ("weight", "bias")}
    require_close(joined(gradients for _, gradients in results), plain, rtol=1e-5, atol=1e-9)


# rank 0 has two activations at most, two wait on rank 1, whose rooms are made in another order than they are used
BPIPE = [
    ["0F0", "0E0", "0F1", "0D0", "0E1", "0F2", "0D1", "0L0", "0B0", "0W0", "0L1", "0BW1", "0F3", "0BW2", "0BW3"],
    ["0A1", "0A0", "1F0", "1BW0", "1F1", "1B1", "0V0", "1W1", "0V1", "1F2", "1BW2", "1F3", "1BW3"],
]


def test_same_bits_as_plain_autograd(ranks: Ranks) -> None:
    same(ranks, [0, 1], [BPIPE], peers=[1, None])


def test_evicted_bytes_are_on_the_peer(ranks: Ranks) -> None:
    """Without eviction rank 0 has three activations at once; with it two, the others beside the peer's own."""
    problem: Problem = ranks(cases.measure, placement=[0, 1], microbatches=4, offload_parts=1, peers=[1, None])[0]
    stays = [[text for text in program if text[1] not in "EDLAV"] for program in BPIPE]
    evicting, plain = Schedule.parse(problem, BPIPE), Schedule.parse(problem, stays)
    results = ranks(cases.train, placement=[0, 1], schedules=[evicting, plain])
    for rank, ((found, other), _) in enumerate(results):
        assert found.peak_activation_bytes <= certify(problem, evicting).device[rank].bytes
        assert other.peak_activation_bytes <= certify(problem, plain).device[rank].bytes
    ((here, before), _), ((there, alone), _) = results
    evicted = problem.stages[0].evict_bytes or 0
    assert evicted > 0.5 * problem.stages[0].activation_bytes
    assert here.peak_activation_bytes <= before.peak_activation_bytes - evicted
    assert there.peak_activation_bytes >= alone.peak_activation_bytes + 2 * evicted


def test_a_pipeline_without_the_peer_refuses_the_schedule() -> None:
    problem = cases.problem([0, 1], 4, [1, None])
    schedule = Schedule.parse(problem, BPIPE)
    assert any(op.kind == Kind.E for op in schedule.programs[0].ops())
    with pytest.raises(
        ScheduleError, match="evicts from device 0 to device 1, in this pipeline the peer of rank 0 is None"
    ):
        require_peers(schedule, Layout.make([0, 1], 4))


# Routes


def make_blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block() for _ in range(count)]


def rows(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    inputs, targets = torch.randn(2, 2 * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets


def plainly(layout: Layout) -> tuple[list[float], Gradients]:
    torch.set_num_threads(1)
    modules, losses = make_blocks(len(layout.placement)), []
    for j, (x, y) in enumerate(zip(*(part.chunk(M) for part in rows(M)), strict=True)):
        losses += cases.plain_step([modules[s] for s in layout.route(j)], x, y, 1, mse_loss)
    return losses, {name: gradient / M for name, gradient in numbers(dict(enumerate(modules))).items()}


def routed_pipeline(layout: Layout) -> tuple[Pipeline, dict[int, nn.Module]]:
    modules = own(make_blocks(len(layout.placement)), layout.placement)
    ways = {"routes": layout.routes, "microbatch_routes": layout.microbatch_routes}
    return Pipeline(modules, layout.placement, mse_loss, layout.microbatches, **ways), modules


def train_routed(schedule: Schedule) -> tuple[list[float], Gradients]:
    """One step; the batch only where the rank needs it."""
    layout = Layout.from_problem(schedule.problem)
    pipe, modules = routed_pipeline(layout)
    inputs, targets = rows(layout.microbatches)
    with pipe:
        pipe.load(schedule)
        report = pipe.step(
            inputs if layout.first & modules.keys() else None, targets if layout.last & modules.keys() else None
        )
    return report.losses or [], numbers(modules)


M = 3


def mistied() -> list[str]:
    """What a user is told whose ties are wrong."""
    pipe, modules = routed_pipeline(Layout.make([0, 1], 2))
    with pipe:
        unlike = next(iter(modules.values())) if torch.distributed.get_rank() else nn.Linear(2, 3)
        return cases.refusals(lambda: pipe.tie(None), lambda: pipe.tie(unlike))


@st.composite
def routed(draw: Any) -> Problem:
    """Two routes over some of the stages each, in any order; all stages are on one."""
    placement = draw(st.sampled_from(((0, 1), (0, 1, 1, 0), (1, 0, 1))))
    stages = range(len(placement))
    first, second = draw(st.permutations(stages)), draw(st.permutations(stages))
    routes = [first[: draw(st.integers(1, len(first)))], second]
    chosen = draw(st.lists(st.integers(0, 1), min_size=M, max_size=M))
    problem = cases.problem(placement, M, offload_parts=2)
    return problem.replace(routes=routes, microbatch_routes=chosen, overlap_factor=draw(st.sampled_from([None, 0.8])))


@settings(max_examples=examples(12))
@given(st.data(), routed())
def test_any_routes_give_the_same_sums(ranks: Ranks, data: Any, problem: Problem) -> None:
    layout, schedule = Layout.from_problem(problem), data.draw(schedules(problem))
    results = ranks(train_routed, schedule=schedule)
    losses, gradients = plainly(layout)
    for rank, (ours, _) in enumerate(results):
        assert ours == [losses[j] for j in range(M) if layout.placement[layout.route(j)[-1]] == rank]
    require_close(joined(by_name for _, by_name in results), gradients)


def test_invalid_ties_are_refused(ranks: Ranks) -> None:
    for nothing, unlike in ranks(mistied):
        assert nothing == "tie: every rank passed None, so there is nothing to tie"
        assert unlike.startswith("tie: ranks 0 and 1 hold copies of shapes [[3, 2], [3]] and [[32], [32],")


def test_a_schedule_with_other_routes_is_refused() -> None:
    problem = cases.problem([0, 1, 1, 0], 1).replace(routes=[[0, 1], [2, 3]], microbatch_routes=[1])
    schedule = Schedule.parse(problem, [["3F0", "3BW0"], ["2F0", "2BW0"]])
    with pytest.raises(ScheduleError, match=r"sends micro-batch 0 over stages \[2, 3\], this pipeline over \[0, 1\]"):
        prepare(schedule, 0, Layout.make([0, 1, 1, 0], 1, [[0, 1], [2, 3]], [0]))
