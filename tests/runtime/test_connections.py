"""Messages between ranks, and connections that are left of a pipeline that has ended."""

from __future__ import annotations

from support.ranks import cases, connections
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule

SCHEDULE = Schedule.parse(cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])


def test_pipelines_made_one_after_the_other_leave_no_connections_behind(ranks: Ranks) -> None:
    for opened in ranks(connections.again, schedule=SCHEDULE, times=6):
        assert opened[2] == opened[1]


def test_conjugate_and_negative_views_arrive_resolved(ranks: Ranks) -> None:
    assert ranks(connections.views, schedule=SCHEDULE) == [None, [0.0, 0.0]]


def test_ranks_that_call_different_methods_are_told_and_do_not_wait(ranks: Ranks) -> None:
    """Although rank 1 may be in the middle of its step: both are told what the first that found out has found."""
    first, second = ranks(connections.apart, schedule=SCHEDULE)
    assert first == second
    for name, sentence in zip(("evaluate", "clip_grad_norm_", "gather", "load"), first, strict=True):
        called = sentence.partition(", and another rank something else")[0]
        assert called in (f"rank 0 has called {name}", "rank 1 has called step")
