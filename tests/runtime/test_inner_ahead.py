"""Ranks with inner peers begin a step before other ranks have ended the one before."""

from __future__ import annotations

import pytest
from support.close import require_close
from support.ranks import inner_ahead
from support.ranks.cases import LENGTH
from support.ranks.inner_ahead import Turn
from support.ranks.programs import SPLIT
from support.ranks.worker import Ranks


def test_no_rank_waits_for_others_than_its_peers_between_two_steps(four_ranks: Ranks) -> None:
    """The last stage begins a step when the first stage computes in it: did all meet before each step, this never
    ended. Where the batch of all ranks has another shape, or the module of one peer another mode, the step that has
    begun is undone, on all peers, and runs again."""
    turns = [
        Turn(ahead=False),
        Turn(),
        Turn(),
        Turn(ahead=False, length=LENGTH // 2),
        Turn(length=LENGTH // 2),
        Turn(ahead=False, length=LENGTH // 2, evaluating=True),
        Turn(ahead=False, length=LENGTH // 2),
        Turn(length=LENGTH // 2),
    ]
    ranks = four_ranks(inner_ahead.trained, programs=SPLIT, turns=turns)
    expected = inner_ahead.plain(turns)
    for step in range(len(turns)):
        losses, gradients = expected[step]
        largest = max(float(abs(gradient).max()) for gradient in gradients.values())
        for first, last in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert last[step][0] == pytest.approx(losses, rel=1e-4)
            require_close(first[step][1] | last[step][1], gradients, rtol=1e-3, atol=1e-5 * largest)
