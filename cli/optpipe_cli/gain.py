"""What a better schedule gains in a training in which it alternates with the first one."""

from __future__ import annotations

import random
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from optpipe_runtime.demo.train import DemoResult


class Gain(NamedTuple):
    """How much shorter a step is with the best schedule, as a share: the median over rounds, and the range of 95 % of
    its resamples."""

    median: float
    low: float
    high: float


def rounds(told: DemoResult, best: int, count: int) -> list[float]:
    """Return the gain of each of the last `count` rounds, in which the first and the best schedule alternated."""
    settled = [step for step in told.steps if step.settled and not step.live and step.version in (0, best)]
    medians = [median(step.ms for step in phase) for _, phase in groupby(settled, key=lambda step: step.version)][
        -2 * count :
    ]
    return [1 - after / before for before, after in zip(medians[::2], medians[1::2], strict=False)]


def gain_of(rounds: list[float]) -> Gain:
    """Return the gain with its spread by the bootstrap: medians of resampled rounds."""
    if not rounds:
        return Gain(0.0, 0.0, 0.0)
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(rounds, k=len(rounds))) for _ in range(2000))
    return Gain(median(rounds), drawn[50], drawn[-51])
