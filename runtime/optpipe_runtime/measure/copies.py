"""Times of transfers: offloads and reloads beside compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, pairwise

from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.measure.rounds import together
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.stage.levels import Level
from optpipe_runtime.stage.trial import Trial


def try_transfers(rank: Rank, trials: Sequence[Trial], level: Level | None, clock: Clock, repeats: int) -> None:
    """Offloads and reloads the activations of all stages, or their checkpoints at a level, one after the other, each
    while the stage computes; in full duplex one is reloaded while the next is offloaded."""
    layout, limit = rank.layout, rank.pool.limit
    fits = [[limit is None or n * trial.host_bytes(rank.pool, level) <= limit for n in (1, 2)] for trial in trials]
    by_peer = rank.cpu_group.gather_by_peer(fits)
    one_fits, two_fit = (
        [all(ranks[rank.number][k][n] for ranks in by_peer) for k in range(len(trials))] for n in (0, 1)
    )
    fitting = list(compress(trials, one_fits))
    both_ways = layout.full_duplex and bool(fitting) and all(compress(two_fit, one_fits))
    moving = [(trial, j) for j, trial in enumerate(fitting * 2 if both_ways and len(fitting) == 1 else fitting)]
    for trial, j in moving:
        trial.moved = level
        trial.forward(j)
    sharers = layout.shared_links.get(layout.link(rank.number) or "", ())
    for turn in range(max(map(len, layout.shared_links.values()), default=1)):
        own_turn = moving if not sharers or sharers[turn % len(sharers)] == rank.number else []
        with _first_offloaded(own_turn if both_ways else []):
            once = partial(_both_ways if both_ways else _one_way, own_turn)
            together(rank, once, [trial.times for trial, _ in own_turn], clock, repeats)
    for trial, j in moving:
        trial.forget(j)
        trial.moved = None


def _one_way(moving: Sequence[tuple[Trial, int]]) -> None:
    for trial, j in moving:
        leaving = trial.start_out(j)
        trial.beside()
        trial.end_out(j, leaving)
        returning = trial.start_back(j)
        trial.beside()
        trial.end_back(j, returning)


def _both_ways(moving: Sequence[tuple[Trial, int]]) -> None:
    """The first activation is off the device before and after."""
    for (trial, j), (other, k) in pairwise([*moving, *moving[:1]]):
        returning, leaving = trial.start_back(j), other.start_out(k)
        other.beside()
        other.end_out(k, leaving)
        trial.end_back(j, returning)


@contextmanager
def _first_offloaded(moving: Sequence[tuple[Trial, int]]) -> Iterator[None]:
    for trial, j in moving[:1]:
        trial.times.recording = False  # until all have warmed up
        trial.end_out(j, trial.start_out(j))
    yield
    for trial, j in moving[:1]:
        trial.reload(j)
