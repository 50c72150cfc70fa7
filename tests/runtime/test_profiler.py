"""The profiled problem predicts the memory that a schedule really takes; a step that holds more says after which op. By
default activations may take what is free on a GPU beside all else that a step allocates."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.ranks import cases, inner
from support.ranks.cases import LENGTH, WIDTH, Gradients, batch, loss_fn, numbers, own_stages
from support.ranks.links import Slow
from support.ranks.programs import ONE_F_ONE_B
from support.ranks.replicas import MIXED, wrapped
from support.ranks.swaps import heard
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_runtime import Layout, Pipeline, StepReport
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.pipeline import step_runner
from optpipe_runtime.torch_private.tensors import local

Span = tuple[float, float]  # on the machine's clock


def copies(
    placement: Sequence[int],
    copy_s: Sequence[float],
    full_duplex: bool = False,
    links: Sequence[str | None] | None = None,
) -> tuple[Measured, list[Span], list[Span]]:
    """Profiles where a rank's copies take so long; when they ran, out and back."""
    rank = torch.distributed.get_rank()
    with Pipeline(own_stages(placement), placement, loss_fn, 2, full_duplex=full_duplex, links=links) as pipe:
        link, back = pipe.runner.rank.link, pipe.runner.rank.link.back
        spans: list[list[Span]] = [[], []]
        link.out = link.back = Slow(link.out, lambda *span: spans[0].append(span), copy_s[rank])
        if full_duplex:
            link.back = Slow(back, lambda *span: spans[1].append(span), copy_s[rank])
        pipe.profile(*batch(0, 2), activation_budget_bytes=10**9, repeats=3)
        assert pipe.measured is not None
        return pipe.measured, spans[0], spans[full_duplex]


def two_routes(loss_s: float) -> Measured:
    """Stage 1 ends the first route, of one of four micro-batches; the others go on. The loss takes long."""
    placement = [0, 1, 0]
    rank = torch.distributed.get_rank()
    stages: dict[int, nn.Module] = {s: nn.Linear(WIDTH, WIDTH) for s, owner in enumerate(placement) if owner == rank}

    def slow(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(loss_s)
        return functional.mse_loss(output, target)

    x: Any = torch.randn(8, WIDTH)
    with Pipeline(stages, placement, slow, 4, routes=[[0, 1], [0, 1, 2]], microbatch_routes=[0, 1, 1, 1]) as pipe:
        pipe.profile(x, x, activation_budget_bytes=10**9, repeats=3)
        assert pipe.measured is not None
        return pipe.measured


def changing_the_batch() -> bool:
    """Whether the batch stays as it was where the first stage and the loss change it in place."""
    rank, batch = torch.distributed.get_rank(), torch.ones(2, 4, 8)
    stages = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Linear(8, 8)]
    inputs, targets = -batch, batch.clone()
    with Pipeline({rank: stages[rank]}, [0, 1], lambda y, target: (y - target.mul_(0.5)).square().mean(), 2) as pipe:
        pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=1)
    return torch.equal(inputs, -batch) and torch.equal(targets, batch)


M = 3


def profiled(placement: Sequence[int], microbatches: int, **options: Any) -> tuple[str, list[StepReport], Gradients]:
    """Profiles, then trains a step with every micro-batch offloaded, one with all recomputed, one with all kept. Also
    returns what .grad was after profiling."""
    modules = own_stages(placement, dropout=0.1)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    inputs, targets = batch(0, microbatches)
    with Pipeline(modules, placement, loss_fn, microbatches) as pipe:
        problem = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=3, **options)
        untouched = numbers(modules)
        reports = []
        for parts, recompute in ((problem.stages[0].offload_parts, False), (0, True), (0, False)):
            programs = [one_at_a_time(s, microbatches, parts, recompute) for s in range(len(placement))]
            pipe.load(Schedule.parse(problem, programs))
            reports.append(pipe.step(inputs, targets))
            assert reports[-1].peak_activation_bytes is not None, "the first step by a schedule is counted"
            assert pipe.step(inputs, targets).peak_activation_bytes is None, "the second is not"
            assert pipe.step(inputs, targets, trace=True).peak_activation_bytes == reports[-1].peak_activation_bytes
    return problem.to_json(), reports, untouched


def one_at_a_time(stage: int, microbatches: int, parts: int, recompute: bool = False) -> list[str]:
    """All forwards of a stage, each offloaded in `parts` parts, then all backwards, each after a recompute."""
    away = [[f"{stage}{kind}{j}.{k}" for kind in "ODR" for k in range(parts)] for j in range(microbatches)]
    first = [op for j in range(microbatches) for op in (f"{stage}F{j}", *away[j][: 2 * parts])]
    again = [[f"{stage}C{j}"] if recompute else away[j][2 * parts :] for j in range(microbatches)]
    return first + [op for j in range(microbatches) for op in (*again[j], f"{stage}B{j}", f"{stage}W{j}")]


@pytest.mark.parametrize("parts", [1, 3])
def test_measured_bytes_are_the_certified_ones(ranks: Ranks, parts: int) -> None:
    results = ranks(profiled, placement=[0, 1], microbatches=M, offload_parts=parts)
    assert results[0][0] == results[1][0], "every rank has the same problem"
    problem = Problem.from_json(results[0][0])
    assert problem.p2p_ms > 0
    for rank, (_, (away, again, here), gradients) in enumerate(results):
        assert all(np.all(gradient == 1) for gradient in gradients.values()), "as before the profile"
        stage = problem.stages[rank]
        assert min(stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) > 0
        assert min(stage.offload_ms or 0, stage.reload_ms or 0, stage.recompute_ms or 0) > 0
        assert stage.offload_parts == parts
        assert 0 < stage.saved_for_weight_bytes <= stage.activation_bytes
        assert 0.5 * stage.activation_bytes < (stage.offload_bytes or 0) <= stage.activation_bytes
        for report, split, recompute in ((away, parts, False), (again, 0, True), (here, 0, False)):
            schedule = Schedule.parse(problem, [one_at_a_time(s, M, split, recompute) for s in range(2)])
            certificate = certify(problem, schedule)
            assert report.peak_activation_bytes <= certificate.device[rank].bytes
            assert report.host_peak_bytes >= certificate.host[rank].bytes
        assert here.peak_activation_bytes == M * stage.activation_bytes
        assert stage.checkpoint_bytes == (0 if rank == 0 else 2 * LENGTH * WIDTH * 4), "what came from the stage before"
        assert again.peak_activation_bytes == (M - 1) * stage.checkpoint_bytes + stage.activation_bytes
        assert away.peak_activation_bytes < 0.6 * here.peak_activation_bytes
        assert here.host_peak_bytes == 0


@pytest.mark.parametrize("host_memory_bytes", [0, 10**4])
def test_a_host_too_small_for_an_activation_offloads_nothing(ranks: Ranks, host_memory_bytes: int) -> None:
    problem, _ = ranks(
        cases.measure, placement=[0, 1], microbatches=M, offload_parts=2, host_memory_bytes=host_memory_bytes
    )
    assert [device.host_memory_bytes for device in problem.devices] == [host_memory_bytes] * 2
    assert not any(stage.can_offload for stage in problem.stages)
    assert all(stage.activation_bytes > 0 for stage in problem.stages)


# Measured while the others are at it


def inside(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The share of the time of these spans that lies between the first and the last of the others."""
    first, last = others[0][0], others[-1][1]
    return sum(max(0.0, min(b, last) - max(a, first)) for a, b in spans) / sum(b - a for a, b in spans)


def test_a_rank_with_fast_copies_measures_until_the_slow_one_has_finished(ranks: Ranks) -> None:
    (measured, quick, _), (_, slow, _) = ranks(copies, placement=[0, 1], copy_s=[0.02, 0.2])
    here, there = measured.stages[0]["offload_ms"], measured.stages[1]["offload_ms"]
    assert here.count > 2 * there.count >= 6
    assert 20 <= here.ms < there.ms >= 200
    measuring = slow[-2 * there.count :]  # there and back, without the warm-up
    assert inside(measuring, quick) > 0.5


def test_full_duplex_is_measured_in_both_directions_at_once(ranks: Ranks) -> None:
    results = ranks(copies, placement=[0, 1], copy_s=[0.3, 0.3], full_duplex=True)
    for found, out, back in results:
        assert found.problem.transfer_mode == "full_duplex"
        beside = [any(a < d and c < b for c, d in out) for a, b in back]
        assert sum(beside) >= len(back) - 1, "but for the last, which brings home what is still away"
        for times in found.stages:
            assert times["offload_ms"].ms >= 300
            assert times["reload_ms"].ms >= 300


def test_ranks_that_share_a_link_measure_one_after_the_other(ranks: Ranks) -> None:
    (measured, first, _), (_, second, _) = ranks(copies, placement=[0, 1], copy_s=[0.005, 0.005], links=["a", "a"])
    assert first[-1][1] <= second[0][0]
    assert all(times["offload_ms"].count >= 3 for times in measured.stages)


def test_the_loss_is_part_of_the_last_stage_of_each_route(ranks: Ranks) -> None:
    measured, other = ranks(two_routes, loss_s=0.1)
    assert measured.problem == other.problem
    assert Layout.from_problem(measured.problem) == Layout.make([0, 1, 0], 4, [[0, 1], [0, 1, 2]], [0, 1, 1, 1])
    first, both, last = (stage.forward_ms for stage in measured.problem.stages)
    assert last >= 100
    assert 25 <= both < 0.7 * last, "one of four micro-batches ends there"
    assert first < 0.5 * last


def test_a_batch_that_stages_change_in_place_is_cloned_for_the_profile(ranks: Ranks) -> None:
    assert ranks(changing_the_batch) == [True, True]


# Budgets by default

FREE = 10**8


class Budgeted(NamedTuple):
    """Bytes: the budget, what is set aside for messages, what the gradients take that a step has left, and what it
    needed at most for whole ones of sharded parameters."""

    budget: int
    messages: int
    left: int
    whole: int


def budgeted(program: Sequence[Sequence[str]], sharded: bool) -> Budgeted:
    """Two tensor-parallel ranks a stage; or, `sharded`, two replicas of two such ranks with both stages, gathered in
    bfloat16 and reduced in float32."""
    shape = (2, 1, 2) if sharded else (1, 2, 2)
    ranks = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "pipe", "tensor"))
    replica, number, _ = ranks.get_coordinate() or (0, 0, 0)
    placement = [0, 0] if sharded else [0, 1]
    modules = {
        s: inner.parallel(module, ranks["tensor"])
        for s, module in enumerate(inner.make_stages())
        if placement[s] == number
    }
    if sharded:
        modules = {s: wrapped(module, "fsdp", ranks["replica"], **MIXED) for s, module in modules.items()}
    m = 4
    data = [part.chunk(2)[replica] for part in batch(0, 2 * m)]
    groups = {"group": ranks["pipe"].get_group(), "inner": ranks["tensor"]}
    with Pipeline(modules, placement, loss_fn, m, **groups) as pipe:
        with (
            patch.multiple(step_runner, require_budget=lambda rank: None),
            patch.multiple(
                torch.cuda,
                mem_get_info=lambda device: (FREE, FREE),
                memory_reserved=lambda device: 0,
                memory_allocated=lambda device: 0,
            ),
        ):
            problem = pipe.profile(*data, repeats=1)
        pipe.load(Schedule.parse(problem, program))
        report = pipe.step(*data, trace=True)
        rank = pipe.runner.rank
        found = [
            local(p.grad).untyped_storage()
            for module in modules.values()
            for p in module.parameters()
            if p.grad is not None
        ]
        return Budgeted(
            problem.devices[number].activation_budget_bytes,
            messages_reserve(number, rank.layout, rank.io),
            sum({storage._cdata: storage.nbytes() for storage in found}.values()),
            report.gathered_certified_bytes - sum(rank.replicas.sharded[s].parameter_bytes for s in modules),
        )


BOTH_STAGES = [[f"{s}{kind}{j}" for j in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "BW"), (0, "BW"))]]


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_count_as_large_as_backwards_leave_them(four_ranks: Ranks, sharded: bool) -> None:
    """Those of an embedding whose rows are spread over two ranks have all rows on each. FSDP adds up whole gradients in
    the type of the parameters and, aside, in that of the reduction; then come those of the shards."""
    program = BOTH_STAGES if sharded else ONE_F_ONE_B
    for rank, found in enumerate(four_ranks(budgeted, program=program, sharded=sharded)):
        stages = inner.make_stages() if sharded else inner.make_stages()[rank // 2 : rank // 2 + 1]
        parts, gradients = map(sum, zip(*map(inner.part_bytes, stages), strict=True))
        if sharded:
            assert found.whole == gradients // 2 + gradients
            assert found.left == parts // 2
        else:
            assert (found.whole, found.left) == (0, gradients)
        assert found.budget == int(0.9 * (FREE - found.messages - found.whole - found.left))


# More than is certified

WIDE, ROWS = 256, 8


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        return y.tanh().tanh() if x[0, 0] > 100 else y


def inputs(microbatches: int, large: Sequence[int] = ()) -> Tensor:
    torch.manual_seed(0)
    batch = torch.randn(microbatches * ROWS, WIDE)
    batch[[j * ROWS for j in large], 0] = 1000.0
    return batch


def profiled_then_large(
    programs: Sequence[Sequence[str]], large: Sequence[int]
) -> tuple[Problem, list[StepReport], list[str]]:
    """A usual step, two with `large` micro-batches, and one of these after a swap. What the log says."""
    microbatches = sum(text.startswith("0F") for text in programs[0])
    rank = torch.distributed.get_rank()
    with Pipeline({rank: Sometimes()}, [0, 1], functional.mse_loss, microbatches) as pipe, heard() as told:
        usual, targets = inputs(microbatches), torch.zeros(microbatches * ROWS, WIDE)
        problem = pipe.profile(usual, targets, activation_budget_bytes=10**9, repeats=1)
        told.clear()
        pipe.load(Schedule.parse(problem, programs))
        reports = [pipe.step(usual, targets, trace=True)]
        reports += [pipe.step(inputs(microbatches, large), targets, trace=True) for _ in range(2)]
        stays = [[text for text in program if text[1] not in "ODR"] for program in programs]
        pipe.load(Schedule.parse(problem, stays))
        reports.append(pipe.step(inputs(microbatches, large), targets, trace=True))
        return problem, reports, [line for line in told if "certified" in line]


PROGRAMS = [
    ["0F0", "0O0", "0F1", "0D0", "0F2", "0B1", "0R0", "0W1", "0BW0", "0BW2"],
    ["1F0", "1F1", "1BW1", "1BW0", "1F2", "1BW2"],
]


def test_a_microbatch_that_saves_more_than_was_profiled_is_named(ranks: Ranks) -> None:
    more = 2 * ROWS * WIDE * 4  # bytes: the results of two tanh
    (problem, reports, told), (_, others, nothing) = ranks(profiled_then_large, programs=PROGRAMS, large=[2])
    usual, first, again, swapped = (report.excess for report in reports)
    assert usual is None
    assert (str(first.op), first.held_bytes - first.certified_bytes) == ("0F2", more)
    assert again == first
    assert str(swapped.op) == "0F2"
    assert told == [
        f"rank 0 holds {found.held_bytes} bytes after 0F2, {found.certified_bytes} are certified"
        for found in (first, swapped)
    ], "once for each schedule"
    assert [report.excess for report in others] == [None] * 4
    assert nothing == []
    for report in reports[:3]:
        assert [time.certified_bytes for time in report.trace] == certified_bytes(problem)
    assert [time.held_bytes for time in reports[0].trace] == certified_bytes(problem), (
        "the profile's batch holds what was profiled"
    )
    extra = [time.held_bytes - time.certified_bytes for time in reports[1].trace]
    assert extra == [0, 0, 0, 0, *[more] * 5, 0], "from 0F2 to its backward"


def certified_bytes(problem: Problem) -> list[int]:
    compiled = Schedule.parse(problem, PROGRAMS).compiled
    return compiled.held.after[compiled.rows.of_device(0)].tolist()
