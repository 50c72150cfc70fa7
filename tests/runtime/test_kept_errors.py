"""An error that a rank keeps does not hold the pipeline's connections: the other ranks hear of the failure."""

from __future__ import annotations

import pytest
from support.ranks import cases, kept
from support.ranks.worker import Ranks


def test_the_error_of_a_rank_that_lost_another(four_ranks: Ranks) -> None:
    """Rank 1 waits for what rank 2 sends by way of rank 0 or 3, which lose rank 2 and keep that error."""
    errors, losses = zip(*four_ranks(kept.learning, world=4, failing=2), strict=True)
    why = "rank 2 was learning stage 2, by its first forward: ValueError: not today"
    assert errors == (why, why, "not today", why)
    assert losses[3] == pytest.approx(cases.plain(4, 1)[0][0])


def test_the_error_of_the_rank_that_failed(ranks: Ranks) -> None:
    """In a function of torch."""
    (own, _), (heard, losses) = ranks(kept.gathering, world=2)
    assert "<lambda>" in own
    assert heard.startswith("rank 0: ")
    assert heard.endswith(own)
    assert losses == pytest.approx(cases.plain(2, 1)[0][0])
