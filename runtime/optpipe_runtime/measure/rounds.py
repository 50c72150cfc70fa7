"""Measuring on all ranks at the same time, and equally long on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import ceil

from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.trial import OpTimer

WARM_UP = 2  # rounds
MOST_ROUNDS = 1000


def together(rank: Rank, once: Callable[[], object], times: Iterable[OpTimer], clock: Clock, repeats: int) -> None:
    """Warms up, then calls `once` at least `repeats` times, on every rank about as long as on the slowest."""
    rank.cpu_group.minimum(0)  # earlier measurements have ended on all ranks
    own = 0.0
    for _ in range(WARM_UP):
        start = time.perf_counter()
        once()
        clock.settle()
        own = time.perf_counter() - start
    for timer in times:
        timer.clear()
    by_peer = rank.cpu_group.gather_by_peer(own)  # all ranks begin here
    slowest, own = max(map(max, by_peer)), max(times[rank.number] for times in by_peer)
    for _ in range(min(MOST_ROUNDS, max(repeats, ceil(repeats * slowest / own)))):
        once()
    clock.settle()


def routes(rank: Rank, s: int) -> list[int]:
    """The routes over a stage that micro-batches take; the first one if they take none."""
    over = [r for r, route in enumerate(rank.layout.routes) if s in route]
    return [r for r in over if r in rank.layout.microbatch_routes] or over[:1]
