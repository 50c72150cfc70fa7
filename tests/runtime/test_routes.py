"""Routes: micro-batches pass the stages in different orders, or different stages. Losses and gradients are those of a
plain run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.oracles.channels import run_by_hand
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks.cases import LENGTH, WIDTH, Block, Gradients, numbers, own
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.errors import ScheduleError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline, prepare


def make_blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block() for _ in range(count)]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    inputs, targets = torch.randn(2, 2 * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets


def plainly(layout: Layout) -> tuple[list[float], Gradients]:
    torch.set_num_threads(1)
    modules, losses = make_blocks(len(layout.placement)), []
    for j, (x, y) in enumerate(
        zip(*(part.chunk(layout.microbatches) for part in batch(layout.microbatches)), strict=True)
    ):
        for s in layout.route(j):
            x = modules[s](x)
        loss = mse_loss(x, y)
        torch.autograd.backward(loss / layout.microbatches)
        losses.append(loss.item())
    return losses, numbers(dict(enumerate(modules)))


def make(layout: Layout) -> tuple[Pipeline, dict[int, nn.Module]]:
    modules = own(make_blocks(len(layout.placement)), layout.placement)
    ways = {"routes": layout.routes, "microbatch_routes": layout.microbatch_routes}
    return Pipeline(modules, layout.placement, mse_loss, layout.microbatches, **ways), modules


def train(schedule: Schedule) -> tuple[list[float], Gradients]:
    """One step; the batch only where the rank needs it."""
    layout = Layout.from_problem(schedule.problem)
    pipe, modules = make(layout)
    inputs, targets = batch(layout.microbatches)
    with pipe:
        pipe.load(schedule)
        report = pipe.step(
            inputs if layout.first & modules.keys() else None, targets if layout.last & modules.keys() else None
        )
    return report.losses or [], numbers(modules)


M = 3


def mistied() -> list[str]:
    """What a user is told whose ties are wrong."""
    pipe, modules = make(Layout.make([0, 1], 2))
    with pipe:
        unlike = next(iter(modules.values())) if torch.distributed.get_rank() else nn.Linear(2, 3)
        return cases.refusals(lambda: pipe.tie(None), lambda: pipe.tie(unlike))


@st.composite
def problems(draw: Any, placements: tuple[tuple[int, ...], ...]) -> Problem:
    """Two routes over some of the stages each, in any order; all stages are on one."""
    placement = draw(st.sampled_from(placements))
    stages = range(len(placement))
    first, second = draw(st.permutations(stages)), draw(st.permutations(stages))
    routes = [first[: draw(st.integers(1, len(first)))], second]
    chosen = draw(st.lists(st.integers(0, 1), min_size=M, max_size=M))
    problem = cases.problem(placement, M, offload_parts=2)
    return problem.replace(routes=routes, microbatch_routes=chosen, overlap_factor=draw(st.sampled_from([None, 0.8])))


@settings(max_examples=examples(100))
@given(st.data())
def test_messages_match_on_any_routes(data: Any) -> None:
    problem = data.draw(problems(((0, 1), (0, 1, 1, 0), (0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 0, 1))))
    schedule = data.draw(schedules(problem))
    run_by_hand([prepare(schedule, rank, Layout.from_problem(problem)) for rank in range(len(problem.devices))])


@settings(max_examples=examples(12))
@given(st.data())
def test_any_routes_give_the_same_sums(ranks: Ranks, data: Any) -> None:
    problem = data.draw(problems(((0, 1), (0, 1, 1, 0), (1, 0, 1))))
    layout, schedule = Layout.from_problem(problem), data.draw(schedules(problem))
    results = ranks(train, schedule=schedule)
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
