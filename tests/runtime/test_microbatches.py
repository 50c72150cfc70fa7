"""Micro-batches that are cut already, of different shapes: losses and gradients are those of a plain run, and only
shapes that do not follow from others are learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.close import joined, require_close
from support.ranks import cases, microbatches
from support.ranks.microbatches import COUNTS, EVALUATED, FIRST, Expected, Planned, Sizes, Turn
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks
from support.service import running, settings_in

from optpipe.schedule import Schedule

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
    """Of the ranks of one pipeline."""
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


def test_the_next_training_starts_from_the_rules_of_the_last(ranks: Ranks, tmp_path: Path) -> None:
    def losses_of(seen: Sequence[microbatches.Streamed]) -> list[list[float]]:
        return [first + last for first, last in zip(*(each.losses for each in seen), strict=True)]

    with running(settings_in(tmp_path)) as (url, _):
        trainings = [ranks(microbatches.streamed, taken=COUNTS, budget=400_000, url=url) for _ in range(2)]
        [job] = httpx.get(f"{url}/v1/jobs?state=stream").json()["jobs"]
        told = httpx.get(f"{url}{job['url']}/rules").json()["told"]
    for seen in trainings:
        for losses, expected in zip(losses_of(seen), microbatches.plain(2, COUNTS), strict=True):
            assert losses == pytest.approx(expected.losses, rel=1e-5)
    (first, _), (second, _) = trainings
    assert (first.starts, first.rules) == ([0, 1, 1, 1], None)
    assert second.starts == [0, 2, 2, 2]
    assert told["step"] == len(COUNTS) - 1
    assert second.rules.step.microbatches == len(COUNTS[0].sizes)


def test_what_fits_in_no_order_is_told_before_the_step(ranks: Ranks) -> None:
    large = Turn((Sizes(1, 8), Sizes(4, 60), Sizes(1, 9)))
    seen = ranks(microbatches.planned, placement=[0, 1], taken=[FIRST, large, COUNTS[3]], budget=200_000)
    for _, refused, after in seen:
        assert re.match(r"^devices\[\d\]\.activation_budget_bytes = .*: micro-batch 1 by itself needs", refused.refused)
        assert after.programs, "the training may go on without it"


def test_what_a_training_has_learnt_spreads_a_batch(ranks: Ranks) -> None:
    first, other = ranks(microbatches.spread, turn=FIRST, budget=400_000)
    assert first.problem == first.planned
    assert sorted(sum(first.assigned, ())) == sorted(sum(first.packed, ())) == [0, 1, 2, 3]
    assert other.refused == "problem was called on rank 1: rank 0 has the costs"


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_runs_out_of_memory_runs_again_one_micro_batch_at_a_time(ranks: Ranks, times: int) -> None:
    """If it does so again it is undone, and the pipeline can be used."""
    first, last = ranks(microbatches.scarce, turn=FIRST, budget=400_000, times=times)
    why = r"rank 1 was at 1F\d: F of stage 1, micro-batch \d: OutOfMemoryError: too much; the step"
    assert re.match(why + " runs again, one micro-batch at a time", first.logged[-1])
    assert re.match("^$" if times == 1 else why + " is undone: leave it out or cut", first.told)
    assert first.told == last.told
    [(losses, gradients, _)] = microbatches.plain(2, [FIRST])
    assert last.losses == pytest.approx(losses, rel=1e-6)
    require_close(first.gradients | last.gradients, gradients, rtol=1e-7, atol=1e-6)
    alone = " ".join(f"1F{j} 1BW{j}" for j in range(4))
    assert (first.programs[1] == last.programs[1] == alone) == (times == 1)


def test_an_optimizer_on_the_host_updates_in_planned_steps(ranks: Ranks) -> None:
    _, losses = ranks(microbatches.hosted, taken=COUNTS, budget=400_000)
    for found, expected in zip(losses, microbatches.plain(2, COUNTS), strict=True):
        assert found == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("planned", [False, True])
def test_a_rank_with_more_batches_is_told_which_one_has_fewer(ranks: Ranks, planned: bool) -> None:
    told = ranks.survivors(microbatches.uneven, dying=1, planned=planned)
    assert told == [
        "rank 1 closed its pipeline after step 3, and rank 0 goes on with step 4: give all ranks equally many batches"
    ]


def test_wrong_use_is_told_on_every_rank(ranks: Ranks) -> None:
    parts = [
        "the micro-batches of this step are not those that were announced for it",
        "rank 1 announces step 2 and rank 0 step 1: all ranks must have equally many batches",
        "costs is of a pipeline of 3 stages: this one has 2",
        "microbatches[0].tokens = nan: a number from 0 to 2^53 was expected",
    ]
    for told in ranks(microbatches.misused):
        for sentence, part in zip(told, parts, strict=True):
            assert part in sentence
