"""On one rank gradients are clipped bit by bit as by torch, in every type. Several ranks: test_training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optpipe_runtime.ranks.clipping import clip


class Alone:
    """A group of one rank."""

    peer, peers = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_equals_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(7, 5, dtype=dtype) for _ in range(2))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        own.grad = torch.randn_like(own)
        other.grad = own.grad.clone()
    group: Any = Alone()
    norm = clip(dict(ours.named_parameters()), (), group, 0.05, 2.0)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)), rel=1e-6)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
