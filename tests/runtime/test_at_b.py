"""The profile tells whose weight gradients come at B, and how much of its time they take."""

from __future__ import annotations

import pytest
from support.ranks import at_b
from support.ranks.worker import Ranks

from optpipe_runtime.measure.at_b import AtB


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # dynamo's own
def test_what_is_left_at_b_is_told_with_its_share(ranks: Ranks) -> None:
    (found, logged, first), (same, quiet, second) = ranks(at_b.profiled)
    assert same == found
    assert found.keys() == {0, 1}
    assert found[0].names == ("1.norm.bias", "1.norm.weight"), "the compiled layer leaves its linear layer's to W"
    assert found[0].share is not None
    assert 0 <= found[0].share < 1
    assert found[1].names == ("1.raw",)
    assert found[1].trained == 3
    assert found[1].share is not None
    assert 0 < found[1].share < 1
    assert [line for line in logged if "come at B" in line] == [f"stage {s}: {found[s]}" for s in (0, 1)]
    assert not [line for line in quiet if "come at B" in line]
    assert all([*first, *second])


def test_its_sentence_names_the_first() -> None:
    assert str(AtB(("a", "b", "c", "d", "e"), 9, 0.256)) == (
        "gradients of 5 of 9 parameters come at B, not at W, in 26 % of its time: a, b, c, d and 1 more"
    )
    assert "not measured" in str(AtB(("a",), 1, None))
