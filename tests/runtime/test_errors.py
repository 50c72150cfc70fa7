"""A failure in a step is reported with rank, op, stage and micro-batch, on the rank where it happens and on those that
wait for it."""

from __future__ import annotations

import pytest
from support.ranks import cases, errors
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule

PROGRAMS = [["0F0", "0O0", "0D0", "0F1", "0R0", "0B0", "0W0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
COPY = "rank 0 was at 0D0: D of stage 0, micro-batch 0; what failed is 0O0: O of stage 0, micro-batch 0"
LOSS = "rank 1 was at 1F0: F of stage 1, micro-batch 0"
WAITING = "rank 0 was at 0B0: B of stage 0, micro-batch 0, waiting for the gradient of 0B0 from rank 1"


@pytest.mark.parametrize(
    ("what", "failing", "sentence", "other"), [("copy", 0, COPY, None), ("loss", 1, LOSS, WAITING)]
)
def test_a_failure_is_named_on_every_rank(
    ranks: Ranks, what: str, failing: int, sentence: str, other: str | None
) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 2), PROGRAMS)
    told = ranks(errors.told, schedule=schedule, placement=[0, 1], what=what)
    assert told[failing][:2] == ["not today", sentence]
    assert told[1 - failing][0] == f"{sentence}: ValueError: not today"
    assert other is None or other in told[1 - failing]
