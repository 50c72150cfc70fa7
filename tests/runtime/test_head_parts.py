"""A head whose vocabulary is cut over stages: losses and gradients are those of cross entropy over all words."""

import numpy as np
import pytest
from support.ranks import cases, head_parts
from support.ranks.worker import Ranks

MICROBATCHES = 4


@pytest.mark.parametrize("placement", [[0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0, 1]])
def test_parts_of_a_head_are_the_head(ranks: Ranks, placement: list[int]) -> None:
    losses, whole = head_parts.plain(MICROBATCHES)
    schedule = cases.all_forwards_first(placement, MICROBATCHES)
    found = ranks(head_parts.train, placement=placement, schedule=schedule)
    ours = {name: gradient for _, gradients in found for name, gradient in gradients.items()}
    np.testing.assert_allclose(found[placement[-1]][0], losses, rtol=1e-5)
    parts = [ours.pop(f"{s}.{'part.' if s == 1 else ''}weight") for s in range(1, len(placement))]
    np.testing.assert_allclose(np.concatenate(parts), whole.pop("2.weight"), rtol=1e-4, atol=1e-6)
    assert len(ours) == len(whole)
    for name, gradient in whole.items():
        own = f"1.inside.{name[2:]}" if name.startswith("1.") else name
        np.testing.assert_allclose(ours[own], gradient, rtol=1e-4, atol=1e-6)
