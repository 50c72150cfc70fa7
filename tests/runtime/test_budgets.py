"""By default activations may take what is free on a GPU beside all else that a step allocates."""

from __future__ import annotations

import pytest
from support.ranks import budgets, inner
from support.ranks.programs import ONE_F_ONE_B
from support.ranks.worker import Ranks

BOTH_STAGES = [[f"{s}{kind}{j}" for j in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "BW"), (0, "BW"))]]


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_count_as_large_as_backwards_leave_them(four_ranks: Ranks, sharded: bool) -> None:
    """Those of an embedding whose rows are spread over two ranks have all rows on each. FSDP adds up whole gradients in
    the type of the parameters and, aside, in that of the reduction; then come those of the shards."""
    program = BOTH_STAGES if sharded else ONE_F_ONE_B
    for rank, found in enumerate(four_ranks(budgets.profiled, program=program, sharded=sharded)):
        stages = inner.make_stages() if sharded else inner.make_stages()[rank // 2 : rank // 2 + 1]
        parts, gradients = map(sum, zip(*map(inner.part_bytes, stages), strict=True))
        if sharded:
            assert found.whole == gradients // 2 + gradients
            assert found.left == parts // 2
        else:
            assert (found.whole, found.left) == (0, gradients)
        assert found.budget == int(0.9 * (budgets.FREE - found.messages - found.whole - found.left))
