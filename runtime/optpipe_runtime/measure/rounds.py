"""Measuring on all ranks at the same time, and equally long on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil

from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.stage.timer import OpTimer

WARM_UP = 2  # rounds
MOST_ROUNDS = 1000


def together(rank: Rank, once: Callable[[], object], timers: Sequence[OpTimer], clock: Clock, repeats: int) -> None:
    """Warms up, then calls `once` at least `repeats` times, on every rank about as long as on the slowest. What the
    timers note in the warm-up does not count."""
    rank.cpu_group.minimum(0)  # earlier measurements have ended on all ranks
    round_s = 0.0
    for timer in timers:
        timer.recording = False
    for _ in range(WARM_UP):
        start = time.perf_counter()
        once()
        clock.settle()
        round_s = time.perf_counter() - start
    for timer in timers:
        timer.recording = True
    by_peer = rank.cpu_group.gather_by_peer(round_s)  # all ranks begin here
    slowest_s = max(map(max, by_peer))
    round_s = max(seconds[rank.number] for seconds in by_peer)  # inner peers do equally many rounds
    for _ in range(min(MOST_ROUNDS, max(repeats, ceil(repeats * slowest_s / round_s)))):
        once()
    clock.settle()


def routes(rank: Rank, s: int) -> list[int]:
    """The routes over a stage that micro-batches take; the first one if they take none."""
    over = [r for r, route in enumerate(rank.layout.routes) if s in route]
    return [r for r in over if r in rank.layout.microbatch_routes] or over[:1]
