"""Micro-batches that are cut already, of different shapes: losses and gradients are those of a plain run, and only
shapes that do not follow from others are learned."""

from __future__ import annotations

import numpy as np
import pytest
from support.ranks import cases, microbatches
from support.ranks.microbatches import Sizes, Turn
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule

FIRST = Turn((Sizes(2, 9), Sizes(1, 16), Sizes(3, 4), Sizes(2, 12)))
BETWEEN = Turn((Sizes(1, 9), Sizes(2, 5), Sizes(3, 16), Sizes(1, 7)), weighted=True)
LONGER = Turn((Sizes(2, 40), Sizes(2, 5), Sizes(1, 16), Sizes(1, 7)))
EVALUATED = Turn((Sizes(2, 7), Sizes(1, 30), Sizes(2, 3), Sizes(1, 4), Sizes(1, 5)), train=False)


@pytest.mark.parametrize(
    "programs", [ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED], ids=["1f1b", "split", "away", "again"]
)
def test_every_step_equals_a_plain_run(ranks: Ranks, programs: list[list[str]]) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), programs)
    turns = [FIRST, BETWEEN, EVALUATED, LONGER, BETWEEN, FIRST]
    seen = ranks(microbatches.turns, schedule=schedule, taken=turns)
    for turn, (losses, gradients), first, last in zip(turns, microbatches.plain(2, turns), *seen, strict=True):
        assert last.losses == losses, turn
        weights = turn.weights or [1.0] * len(losses)
        assert last.loss == pytest.approx(np.average(losses, weights=weights))
        np.testing.assert_equal(first.gradients | last.gradients, gradients, err_msg=str(turn))
    learned = [step.learned for step in seen[0]]
    assert learned[1] == learned[4] == learned[5] == 0, "their shapes were learned, or lie between those that were"
    assert learned[3] == 1, "only the longest is new"


COUNTS = [
    FIRST,
    Turn((Sizes(2, 9), Sizes(2, 20), Sizes(1, 5), Sizes(2, 12), Sizes(1, 33), Sizes(1, 7)), weighted=True),
    Turn((Sizes(1, 30), Sizes(1, 8), Sizes(2, 6))),
    Turn((Sizes(1, 11), Sizes(2, 18), Sizes(3, 5), Sizes(1, 6), Sizes(2, 13)), weighted=True),
]


def test_each_step_has_a_schedule_of_its_own(ranks: Ranks) -> None:
    seen = ranks(microbatches.planned, placement=[0, 1], taken=COUNTS, budget=10**6)
    for turn, (losses, gradients), first, last in zip(COUNTS, microbatches.plain(2, COUNTS), *seen, strict=True):
        assert last.losses == pytest.approx(losses, rel=1e-5), turn
        together = first.gradients | last.gradients
        assert together.keys() == gradients.keys()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(together[name], gradient, atol=1e-6, err_msg=f"{turn} {name}")
        assert first.programs == last.programs, "all ranks run one schedule"
        for rank in (first, last):
            assert rank.peak_bytes <= rank.certified_bytes, turn
    assert len({tuple(step.programs) for step in seen[0]}) == len(COUNTS)
