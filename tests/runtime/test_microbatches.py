"""Micro-batches that are cut already, of different shapes: losses and gradients are those of a plain run, and only
shapes that do not follow from others are learned."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.ranks import cases, microbatches
from support.ranks.cases import Gradients, loss_fn, make_stages, numbers, sgd
from support.ranks.microbatches import (
    COUNTS,
    EVALUATED,
    FIRST,
    Expected,
    Planned,
    Sizes,
    Turn,
    batch,
    given_here,
    planning,
)
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.swaps import failing, heard
from support.ranks.worker import Ranks

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepRules, StepScheduler, assign, pack
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps, StepReport
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.stage.io import Dimensions, LearnedRoutes, RouteSpecs, Shape, Spec, StageIO, extremes_first
from optpipe_runtime.steps.planned import tokens_and_squares
from optpipe_runtime.steps.planner import MeasuredStep, StepPlanner

BETWEEN = Turn((Sizes(1, 9), Sizes(2, 5), Sizes(3, 16), Sizes(1, 7)), weighted=True)
LONGER = Turn((Sizes(2, 60), Sizes(2, 5), Sizes(1, 16), Sizes(1, 7)))


@pytest.mark.parametrize(
    "programs", [ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED], ids=["1f1b", "split", "away", "again"]
)
def test_every_step_equals_a_plain_run(ranks: Ranks, programs: list[list[str]]) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), programs)
    turns = [FIRST, BETWEEN, EVALUATED, LONGER, BETWEEN, FIRST]
    seen = ranks(microbatches.turns, schedule=schedule, taken=turns)
    for turn, (losses, gradients, _), first, last in zip(turns, microbatches.plain(2, turns), *seen, strict=True):
        assert last.losses == losses, turn
        weights = turn.weights or [1.0] * len(losses)
        assert last.loss == pytest.approx(np.average(losses, weights=weights))
        np.testing.assert_equal(first.gradients | last.gradients, gradients, err_msg=str(turn))
    learned = [step.learned for step in seen[0]]
    assert learned[1] == learned[4] == learned[5] == 0, "their shapes were learned, or lie between those that were"
    assert learned[3] == 1, "only the longest is new"


def require_equal(seen: Sequence[Sequence[Planned]], expected: Sequence[Expected], budget: int) -> None:
    for ranks, (losses, gradients, evaluated) in zip(zip(*seen, strict=True), expected, strict=True):
        assert [loss for rank in ranks for loss in rank.losses] == pytest.approx(losses, rel=1e-5)
        require_close(joined(rank.gradients for rank in ranks), gradients, rtol=1e-7, atol=1e-6)
        assert len({rank.programs for rank in ranks}) == 1, "all ranks run one schedule"
        for rank in ranks:
            assert rank.peak_bytes <= rank.certified_bytes <= budget
        assert [loss for rank in ranks for loss in rank.evaluated] == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(
    ("placement", "max_norm"), [([0, 1], 0.0), ([0, 1, 1, 0], 0.05)], ids=["2 stages", "2 chunks a device, clipped"]
)
def test_each_step_has_a_schedule_of_its_own(ranks: Ranks, placement: list[int], max_norm: float) -> None:
    budget = 200_000 * len(placement)
    seen = ranks(microbatches.planned, placement=placement, taken=COUNTS, budget=budget, max_norm=max_norm)
    require_equal(seen, microbatches.plain(len(placement), COUNTS, max_norm), budget)
    assert len({step.programs for step in seen[0]}) == len(COUNTS)
    assert all((step.norm or 0.0) > max_norm for step in seen[0][1:] if max_norm), "the post-validation was wrong"


def test_on_three_ranks_in_little_memory(three_ranks: Ranks) -> None:
    budget = 130_000  # the largest micro-batch takes two thirds of it
    seen = three_ranks(microbatches.planned, placement=[0, 1, 2], taken=COUNTS, budget=budget)
    require_equal(seen, microbatches.plain(3, COUNTS), budget)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_have_micro_batches_of_their_own(four_ranks: Ranks, how: str) -> None:
    """As many as each has, weighted over both."""
    turns = [COUNTS[0], COUNTS[2], COUNTS[1], COUNTS[3], COUNTS[2], FIRST]
    seen = four_ranks(microbatches.planned, placement=[0, 1], taken=turns, budget=10**6, how=how)
    for step, (losses, gradients) in enumerate(microbatches.plain_replicas(2, turns)):
        by_replica = [len(turn.sizes) for turn in turns[2 * step : 2 * step + 2]]
        for replica, part in ((0, losses[: by_replica[0]]), (1, losses[by_replica[0] :])):
            ranks = seen[2 * replica :][:2]
            evaluated = [loss for rank in ranks for loss in rank[step].evaluated]
            require_equal([[rank[step]] for rank in ranks], [Expected(part, gradients, evaluated)], 10**6)


def continued(
    taken: Sequence[Turn], budget: int, path: Path, hosted: bool = False
) -> tuple[list[list[float]], list[list[StepRules]]]:
    """Planned steps on two ranks, by the costs of an earlier training, if there are some: the losses, and on the rank
    that plans from which rules the search for each step started. `hosted`: that of the last stage
    is updated on the host."""
    losses = []
    hosts = {1: lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1)} if hosted else {}
    costs = CostModel.load(path) if path.exists() else None
    with (
        planning(budget, costs=costs, host_optimizers=hosts) as (train, modules),
        patch.object(StepScheduler, "plan", autospec=True, side_effect=StepScheduler.plan) as plan,
    ):
        optimizer = sgd(*(module for s, module in modules.items() if s not in hosts))
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            losses.append(train.step(**given_here(turn, seed)).losses or [])
            optimizer.step()
        starts = [call.kwargs["starts"] for call in plan.call_args_list]
    if train.costs is not None:
        train.costs.save(path)
    return losses, starts


def spread(turn: Turn, budget: int) -> Any:
    """A planned step; then its micro-batches, or each of them as a document, on two replicas: the problem of the step
    before and after it, and how it is spread; on the rank without the first stage, why it cannot tell."""
    each = [{"squares": size.tokens * size.length, "tokens": size.tokens} for size in turn.sizes]  # in another order
    with planning(budget) as (train, _):
        train.step(**given_here(turn, 0))
        try:
            problem = train.problem(each)
        except InputError as error:
            return str(error)
        packing = pack(each, 2, {"tokens": 64}, train.problem, train.costs, 2)
        return train.schedule.problem, problem, assign(problem, 2).microbatches, packing.documents


class Scarce(NamedTuple):
    """What came of a step by which rank 1 ran out of memory: the losses, what was said, and how the last one ran."""

    losses: list[float]
    gradients: Gradients
    told: str
    logged: list[str]
    programs: tuple[str, ...]


def scarce(turn: Turn, budget: int, times: int) -> Scarce:
    """Planned steps on two ranks, of which one runs out of memory so many times; then once more, if it was refused."""
    told, left, real = "", [times if dist.get_rank() == 1 else 0], Executor.run

    def run(*arguments: Any, **options: Any) -> StepReport:
        left[0] -= 1
        with failing("forward", 2, torch.OutOfMemoryError("too much")) if left[0] >= 0 else nullcontext():
            return real(*arguments, **options)

    with planning(budget) as (train, modules), patch.object(Executor, "run", run), heard() as logged:
        try:
            report = train.step(**given_here(turn, 0))
        except OptPipeError as error:
            told = str(error)
            assert not numbers(modules), "it is undone"
            report = train.step(**given_here(turn, 0))
        programs = tuple(" ".join(map(str, program.ops())) for program in train.schedule.programs)
        return Scarce(report.losses or [], numbers(modules), told, list(logged), programs)


def misused(wrong: str) -> str:
    number = dist.get_rank()
    turns = [Turn((Sizes(1, 4), Sizes(2, 7))), Turn((Sizes(1, 5), Sizes(2, 9))), Turn((Sizes(1, 6), Sizes(1, 4)))]
    batches = [[Microbatches(part) for part in batch(turn, seed)] for seed, turn in enumerate(turns)]

    def train(announced: Sequence[int], run: Sequence[int], stages: int = 2, features: Any = None) -> None:
        costs = CostModel(("tokens", "squares"), stages) if number == 0 else None
        modules = {number: make_stages(2)[number]}
        given = features or tokens_and_squares
        with (
            Pipeline(modules, [0, 1], loss_fn, 2) as pipe,
            PlannedSteps(pipe, given, activation_budget_bytes=10**6, costs=costs) as steps,
        ):
            for k in announced:
                steps.announce(*batches[k])
            for k in run:
                steps.step(*batches[k])

    calls = {
        "not announced": lambda: train([0, 1], [0, 2]),
        "one more": lambda: train([0, 1][: number + 1], [0, 1]),
        "other costs": lambda: train([0], [0], stages=3),
        "not a number": lambda: train([0], [0], features=lambda tokens: {"tokens": float("nan")}),
    }
    with pytest.raises(OptPipeError) as caught:
        calls[wrong]()
    return str(caught.value)


def test_the_next_training_starts_from_the_rules_of_the_last(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    (losses, starts), (others, none) = ranks(continued, taken=COUNTS, budget=400_000, path=path)
    for first, last, expected in zip(losses, others, microbatches.plain(2, COUNTS), strict=True):
        assert first + last == pytest.approx(expected.losses, rel=1e-5)
    assert ([len(each) for each in starts], none) == ([0, 1, 1, 1], [])
    kept = CostModel.load(path).rules
    (_, again), _ = ranks(continued, taken=COUNTS[:1], budget=400_000, path=path)
    assert kept.step.microbatches == len(COUNTS[-1].sizes)
    [[start]] = again
    assert start.step == kept.step
    np.testing.assert_equal(start.rules, kept.rules)


def test_what_fits_in_no_order_is_told_before_the_step(ranks: Ranks) -> None:
    large = Turn((Sizes(1, 8), Sizes(4, 60), Sizes(1, 9)))
    seen = ranks(microbatches.planned, placement=[0, 1], taken=[FIRST, large, COUNTS[3]], budget=200_000)
    for _, refused, after in seen:
        assert re.match(r"^devices\[\d\]\.activation_budget_bytes = .*: micro-batch 1 by itself needs", refused.refused)
        assert after.programs, "the training may go on without it"


def test_what_a_training_has_learnt_spreads_a_batch(ranks: Ranks) -> None:
    (planned, problem, assigned, packed), told = ranks(spread, turn=FIRST, budget=400_000)
    assert problem == planned
    assert sorted(sum(assigned, ())) == sorted(sum(packed, ())) == [0, 1, 2, 3]
    assert told == "problem was called on rank 1: rank 0 has the costs"


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_runs_out_of_memory_runs_again_one_micro_batch_at_a_time(ranks: Ranks, times: int) -> None:
    """If it does so again it is undone, and the pipeline can be used."""
    first, last = ranks(scarce, turn=FIRST, budget=400_000, times=times)
    why = r"rank 1 was at 1F\d: F of stage 1, micro-batch \d: OutOfMemoryError: too much; the step"
    assert re.match(why + " runs again, one micro-batch at a time", first.logged[-1])
    assert re.match("^$" if times == 1 else why + " is undone: leave it out or cut", first.told)
    assert first.told == last.told
    [(losses, gradients, _)] = microbatches.plain(2, [FIRST])
    assert last.losses == pytest.approx(losses, rel=1e-6)
    require_close(first.gradients | last.gradients, gradients, rtol=1e-7, atol=1e-6)
    alone = " ".join(f"1F{j} 1BW{j}" for j in range(4))
    assert (first.programs[1] == last.programs[1] == alone) == (times == 1)


def test_an_optimizer_on_the_host_updates_in_planned_steps(ranks: Ranks, tmp_path: Path) -> None:
    _, (losses, _) = ranks(continued, taken=COUNTS, budget=400_000, path=tmp_path / "costs.json", hosted=True)
    for found, expected in zip(losses, microbatches.plain(2, COUNTS), strict=True):
        assert found == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ("not announced", "the micro-batches of this step are not those that were announced for it"),
        ("one more", "rank 1 announces step 2 and rank 0 step 1: all ranks must have equally many batches"),
        ("other costs", "costs is of a pipeline of 3 stages: this one has 2"),
        ("not a number", "microbatches[0].tokens = nan: a number from 0 to 2^53 was expected"),
    ],
)
def test_wrong_use_is_told(ranks: Ranks, wrong: str, part: str) -> None:
    told = ranks.to_the_end(misused, wrong=wrong)
    assert any(part in sentence for sentence in told)
    assert all(part in sentence or "lost its connection" in sentence for sentence in told)


# What passes between stages for a shape follows from learned shapes, or is learned: it is never guessed

WIDTH = 8


def passing(sizes: Dimensions, lengths: Callable[[int], int] = lambda length: length) -> RouteSpecs:
    """Of one stage whose output has rows, another length and a width; its loss is a number."""
    rows, length = sizes[:2]
    given = Spec((rows, length), torch.int64, False)
    out = Spec((rows, lengths(length), WIDTH), torch.float32, True)
    reached = (frozenset[int](),)
    return (
        StageIO((given,), begins=True, ends=False, outputs=(out,), reached=reached, needed=(0,)),
        StageIO((out,), begins=False, ends=True, outputs=(Spec((), torch.float32, True),), reached=(frozenset({0}),)),
    )


def learned(*all_sizes: Dimensions, lengths: Callable[[int], int] = lambda length: length) -> LearnedRoutes:
    passings = LearnedRoutes()
    for sizes in all_sizes:
        passings.add(sizes, passing(sizes, lengths))
    return passings


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=12), st.integers(1, 3))
def test_what_is_derived_is_what_would_be_learned(shapes: list[Dimensions], factor: int) -> None:
    """Inputs and targets have the same sizes; the output is so many times as long."""
    passings = LearnedRoutes()
    for _, sizes in extremes_first([Shape(None, (*sizes, *sizes)) for sizes in shapes]):
        expected = passing(sizes, lambda length: factor * length)
        found = passings.find(sizes)
        if found is None:
            passings.add(sizes, expected)
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        (lambda length: length, (1, 20, 1, 20)),  # longer than all
        (lambda length: -(-length // 4), (1, 6, 1, 6)),  # in proportion no whole number
        (lambda length: min(length, 10), (1, 9, 1, 9)),  # neither stays nor grows in proportion
        (lambda length: length, (1, 6, 1, 5)),  # by inputs or by targets: not known
    ],
)
def test_other_shapes_are_learned(lengths: Callable[[int], int], new: Dimensions) -> None:
    assert learned((1, 4, 1, 4), (1, 16, 1, 16), lengths=lengths).find(new) is None


def test_bytes_beyond_what_was_certified_make_the_next_certificates_larger() -> None:
    planner, features = StepPlanner(0, None), [{"tokens": 1.0}]
    planner.add(cases.problem([0], 1), features)
    planner._features = dict.fromkeys((1, 2), features)
    planner._learn([[MeasuredStep(n, {}, 1.5) for n in (1, 2)]])
    assert planner.problem(features).stages[0].activation_bytes == (225,)  # 100, 1.5 · 1.5 times


def test_between_learned_shapes_nothing_is_learned() -> None:
    assert learned((1, 4, 1, 4), (1, 16, 1, 16)).find((1, 7, 1, 7)) == passing((1, 7))
