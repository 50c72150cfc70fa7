"""What passes between ranks, and what is left of a pipeline that has ended."""

from __future__ import annotations

import rank_cases
import rank_connections
from rank_worker import Ranks

from optpipe.schedule import Schedule

SCHEDULE = Schedule.parse(rank_cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])


def test_pipelines_made_one_after_the_other_leave_no_connections_behind(ranks: Ranks) -> None:
    for opened in ranks(rank_connections.again, schedule=SCHEDULE, times=6):
        assert opened[2] == opened[1]


def test_a_conjugate_and_a_negative_arrive_as_what_they_are(ranks: Ranks) -> None:
    assert ranks(rank_connections.views, schedule=SCHEDULE) == [None, [0.0, 0.0]]
