"""Losses that autograd functions add inside of backwards, as mixtures of experts do, count as under torch's own
schedules; parameters that only `loss_fn` has are trained as those of the last stage. On one rank gradients are clipped
as by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.close import require_close
from support.ranks import cases, losses
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks
from torch import nn

from optpipe_runtime.ranks.gradients import clip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_added_in_backwards_count_as_by_torch(ranks: Ranks, reduction: str) -> None:
    """And gradients of an earlier step stay as they are."""
    schedules = cases.parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED)
    for pairs in ranks(losses.added, schedules=schedules, reduction=reduction):
        for pair in pairs:
            require_close(*pair, rtol=1e-5, atol=1e-8)


def test_losses_added_in_backwards_count_alike_in_other_places(ranks: Ranks) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    for pair in (*ranks(losses.added_in_torch, schedule=schedule), *ranks(losses.added_on_the_host, schedule=schedule)):
        require_close(*pair, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_losses_added_in_backwards_count_alike_on_replicas(four_ranks: Ranks, how: str) -> None:
    (schedule,) = cases.parsed(SPLIT)
    for pair in four_ranks(losses.added_on_replicas, schedule=schedule, how=how):
        require_close(*pair, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", losses.FORMS)
def test_parameters_of_a_loss_are_the_last_stages(ranks: Ranks, form: str) -> None:
    """Their gradients after a profile, in the norm, after steps that were undone, and with a recomputed stage."""
    (schedule,) = cases.parsed(RECOMPUTED)
    for found in ranks(losses.with_parameters, schedule=schedule, form=form, max_norm=1.0, ahead=False):
        assert found.profile_leaves_none
        assert max(found.norms, found.gradients, found.state) < 1e-5


def test_parameters_of_a_loss_are_validated_with_the_others(ranks: Ranks) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    found = ranks(losses.with_parameters, schedule=schedule, form="a closure", max_norm=0.5, ahead=True)
    assert max(trained.state for trained in found) < 1e-5


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_parameters_of_a_loss_without_replicas_are_refused(four_ranks: Ranks, how: str) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    for told in four_ranks(losses.unwrapped, schedule=schedule, how=how):
        assert len(told) == 2
        for sentence in told:
            assert "is trained with stage 1 and not in its module" in sentence


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
