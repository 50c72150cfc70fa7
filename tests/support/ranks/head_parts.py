"""A head in parts, each of some of the vocabulary, as stages: what `--head-parts` of the cost model stands for."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe.schedule import Schedule
from support.ranks import cases
from support.ranks.cases import Gradients
from support.ranks.device import device


class HeadPart(nn.Module):
    """Logits of the words from `first` on: adds to the logarithm of the sum of their exponentials, and to the target's.

    Takes and returns the head's input, and of each token these two.
    """

    def __init__(self, weight: Tensor, first: int) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(weight.clone()), first

    def forward(self, x: Tensor, total: Tensor, reached: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight)
        mine = (labels >= self.first) & (labels < self.first + len(self.weight))
        chosen = logits.gather(-1, torch.where(mine, labels - self.first, 0)[..., None])[..., 0]
        return x, torch.logaddexp(total, logits.logsumexp(-1)), reached + torch.where(mine, chosen, 0)


class Before(nn.Module):
    """What comes before the head's parts, and the first of them."""

    def __init__(self, inside: nn.Module, part: HeadPart) -> None:
        super().__init__()
        self.inside, self.part = inside, part

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.inside(x)
        total = torch.full(x.shape[:2], -torch.inf, device=x.device)
        return self.part(x, total, torch.zeros_like(total), labels)  # type: ignore[no-any-return]


def cross_entropy(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    _, total, reached = output
    return (total - reached).mean()


def model() -> tuple[nn.Module, nn.Sequential, Tensor]:
    """The first stage, what comes before the head in the second one, and the head's matrix."""
    first, last = cases.make_stages(2)
    assert isinstance(last, nn.Sequential)
    return first, last[:-1], last[-1].weight.detach()


def train(placement: list[int], schedule: Schedule) -> tuple[list[float], Gradients]:
    """A step of a pipeline whose stages from the second on have a part of the head each."""
    m = schedule.problem.microbatches
    first, inside, weight = model()
    shards = weight.chunk(len(placement) - 1)
    starts = accumulate((len(shard) for shard in shards), initial=0)
    parts = [HeadPart(shard, start) for shard, start in zip(shards, starts, strict=False)]
    modules = cases.own([each.to(device()) for each in (first, Before(inside, parts[0]), *parts[1:])], placement)
    inputs, targets = cases.batch(0, m)
    with cases.pipeline(modules, schedule, cross_entropy) as pipe:
        report = pipe.step(inputs, targets, kwargs={s: {"labels": targets} for s in modules if s})
    return report.losses, cases.numbers(modules)


def plain(microbatches: int) -> tuple[list[float], Gradients]:
    """The same by torch's cross entropy over the whole vocabulary."""
    first, inside, weight = model()
    head = nn.Linear(*weight.T.shape, bias=False)
    head.weight = nn.Parameter(weight)
    modules = dict(enumerate((first, inside, head)))
    losses = cases.plain_step(modules.values(), *cases.batch(0, microbatches), microbatches)
    return losses, cases.numbers(modules)
