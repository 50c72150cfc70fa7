"""How far the clocks of ranks are apart.

Nobody leaves a gathering before everybody has entered it. So a rank leaves it, by its own clock, no earlier than the
first rank enters it, by that one's clock, plus what its clock is ahead; and the other way round. Both bounds are kept
over some rounds; what the clock is ahead lies between the two tightest.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 20


class Ahead(NamedTuple):
    """How far the clock of this rank is ahead of the first rank's: `ms`, off by at most `within_ms`."""

    ms: float
    within_ms: float


def now_ms() -> float:
    """The clock that is compared."""
    return time.perf_counter() * 1e3


def compare_clocks(group: dist.ProcessGroup | None, device: torch.device) -> Ahead:
    """All ranks of the group call this, between two steps: it waits for the others, and for the device."""
    entered, left, entered_first = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        entered.append(now_ms())
        entered_first.append(_gather([entered[-1]], group, device)[0])
        left.append(now_ms())
    left_first = _gather(left, group, device)
    most = min(mine - first for mine, first in zip(left, entered_first, strict=True))
    least = max(mine - first for mine, first in zip(entered, left_first, strict=True))
    return Ahead((most + least) / 2, (most - least) / 2)


def _gather(times: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """The first rank's times, after all ranks have told theirs."""
    mine = torch.tensor(times, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    first: list[float] = gathered[0].tolist()  # waits for the device, too
    return first
