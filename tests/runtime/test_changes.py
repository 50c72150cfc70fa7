"""Between steps a user evaluates, takes batches of another size, freezes and unfreezes parameters: results are those of
a plain run."""

from __future__ import annotations

import numpy as np
import pytest
from support.ranks import cases, changes
from support.ranks.changes import Turn
from support.ranks.programs import ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule

TRAIN, EVALUATE = Turn(train=True), Turn(train=False)


@pytest.mark.parametrize("programs", [ONE_F_ONE_B, SPLIT, RECOMPUTED], ids=["1f1b", "split", "recomputed"])
@pytest.mark.parametrize(
    "turns",
    [
        [EVALUATE, TRAIN, EVALUATE, EVALUATE, TRAIN],
        [TRAIN, Turn(True, sequences=3), TRAIN, Turn(False, sequences=5), TRAIN],
        [Turn(True, frozen=True), TRAIN, Turn(True, frozen=True)],
    ],
    ids=["evaluations", "shapes", "freezing"],
)
def test_every_phase_equals_a_plain_run(ranks: Ranks, programs: list[list[str]], turns: list[Turn]) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), programs)
    results = ranks(changes.turns, schedule=schedule, taken=turns)
    for turn, expected, *found in zip(turns, changes.plain(4, turns), *results, strict=True):
        assert found[1].losses == expected.losses, turn
        assert found[0].means | found[1].means == expected.means, turn
        gradients = found[0].gradients | found[1].gradients
        assert bool(gradients) == turn.train
        np.testing.assert_equal(gradients, expected.gradients, err_msg=str(turn))
