"""Chronos-Pipe and what is built on it (Lin et al. 2025): activations live as briefly as a full pipeline allows.

Each device has v looped chunks. The unit is the forward of one chunk; its backward, input and weight
gradient fused, takes two. A device does one forward and one backward in each beat, and device i is 2i units ahead of
device 0. So a chunk that runs without a wait, one unit a device on the way there and two on the way back, has its
backward in the same beat on all devices, and its forward one beat later on each. What is left to choose is the beat in
which each chunk is launched: no two in the same beat modulo v, or they collide on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

import numpy as np

from optpipe.errors import InputError
from optpipe.lift import with_host_updates
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, PART, STAGE, of_kinds
from optpipe.schedule import Schedule
from optpipe_solver.systems.block import Block, repeat, slots
from optpipe_solver.systems.pipeoffload import with_offloads
from optpipe_solver.systems.system import (
    by_slot,
    count_chunks,
    count_devices,
    distinct_slots,
    published,
    recomputed_stages,
)

F, BW = 1, 2  # units that each lasts


@published("chronos", "Lin et al. 2025 (Chronos-Pipe), section 4.1", least=2, most=None, chunks=2)
def chronos(problem: Problem, leaving: int = 0) -> Schedule:
    """Chronos-Pipe (section 4.1): each chunk is launched in the first free beat after the chunk before it.

    3v(m+p-1) units for any p, m and v, which are 1F1B's. Device s holds N - s chunk activations: N = p + sum c (d_c +
    e_c) / v over c < v, where d_c beats lie between the forwards of chunks c and c + 1 and e_c between their backwards.
    For v = 2 that is N = p + 1 + ceil((p-3)/6) + ceil((2p-3)/6); at large p it is (v+1)/(2v) of M, 1F1B's v p, so 75 %.

    `leaving` stages a device are offloaded, those whose activations live longest, as PipeOffload does (section 5.2).
    """
    return with_offloads(_pipe(problem, group=1), leaving)


@published("chronos-recomp", "Lin et al. 2025, section 4.2", least=2, most=None, chunks=2)
def chronos_recomp(problem: Problem, recomputed: int = 1, level: int = 0) -> Schedule:
    """Chronos-Recomp (section 4.2): the `recomputed` shallowest chunks are recomputed just before their backwards, by
    this `level` of their stages.

    The beats of these backwards are longer by the c units that the longest of them recomputes, at most by one, a full
    forward. Chunks keep Chronos-Pipe's beats modulo v, whole rounds later where they would come too early (appendix A,
    Eq. 8).

    For v = 2 and p > 2 at most 6p + (6+c)(m-1) units, less by up to a period where chunk 1's first backward has to wait
    for its beat. Device s holds floor((p-s)/2) + 1 activations, the one that is computed again included.
    """
    p, v = count_devices(problem), count_chunks(problem)
    shallow = recomputed_stages(problem, recomputed, level, "chronos-recomp")
    again_ms, forward_ms = problem.costs.levels.recompute_ms[level, shallow], problem.costs.ms[Kind.F, shallow]
    c = ceil(64 * min(1.0, float(again_ms.max()) / (float(forward_ms.max()) or 1.0))) / 64
    there, back = _launches(p, v)
    beats = _Beats([F + BW + c * (n in {b % v for b in back[:recomputed]}) for n in range(v)])
    for k in range(1, v):
        there[k] = beats.first(there[k], beats.start(there[k - 1] + p - 1) + F - BW * (p - 1))
    back[-1] = there[-1] + p - 1
    for k in reversed(range(v - 1)):
        back[k] = beats.first(back[k] + 1, beats.start(back[k + 1] + 1) + BW * p) - 1
    table, start = slots(_block(p, there, back, beats), [beats.start(v * j) for j in range(problem.microbatches)])
    backward = np.flatnonzero(of_kinds(table, Kind.BW) & (table[:, STAGE] < len(shallow)))
    again = table[backward]
    again[:, KIND], again[:, PART] = Kind.C, level
    return by_slot(problem, np.concatenate([again, table]), np.r_[start[backward] - c, start])


@published("chronos-zero2", "Lin et al. 2025, section 4.3", least=2, most=None, chunks=2)
def chronos_zero2(problem: Problem, group: int = 2) -> Schedule:
    """The ZeRO-2-compatible variant (section 4.3): each chunk is launched for `group` micro-batches in a row.

    So its gradients are reduced once for all of them. The last group has the r micro-batches left.

    Memory as for Chronos-Pipe, d_c and e_c being whole groups of beats. At most 3v(m+p-1) units; 3(v-1)(min(r, p)-1)
    less where group divides p, or m and is at least p.
    """
    if group < 1:
        raise InputError(f"group = {group}: a chunk is launched for at least 1 micro-batch in a row")
    return _pipe(problem, group)


@dataclass(frozen=True)
class _Beats:
    """How many units each beat lasts, repeated; the first starts at 0. Whole 64ths, so that sums are exact."""

    lasts: Sequence[float]

    def start(self, n: int) -> float:
        rounds, rest = divmod(n, len(self.lasts))
        return rounds * sum(self.lasts) + sum(self.lasts[:rest])

    def first(self, like: int, ready: float) -> int:
        """Return the first beat that starts at `ready` or later and is `like` one modulo their number."""
        return next(n for n in count(like % len(self.lasts), len(self.lasts)) if self.start(n) >= ready)


def _pipe(problem: Problem, group: int) -> Schedule:
    p, v = count_devices(problem), count_chunks(problem)
    beats = _Beats([F + BW])
    launches = [v * group * (j // group) + j % group for j in range(problem.microbatches)]
    return repeat(problem, _block(p, *_launches(p, v, group), beats), [beats.start(n) for n in launches])


def _launches(p: int, v: int, group: int = 1) -> tuple[list[int], list[int]]:
    """Return the beats, by chunk, of the first device's forward and of the backward.

    A chunk's p forwards last p/3 beats, its backwards 2p/3. In the deepest chunk, the last device's backward follows
    its forward in one beat.
    """
    there = [group * n for n in distinct_slots(0, v, -(-p // (3 * group)))]
    back = [group * n + there[-1] + p - 1 for n in distinct_slots(0, v, -(-2 * p // (3 * group)))]
    return there, back[::-1]


def _block(p: int, there: Sequence[int], back: Sequence[int], beats: _Beats) -> Block:
    return Block(
        forward=[beats.start(n + i) - BW * i for n in there for i in range(p)],
        backward=[beats.start(n + 1) - BW * (i + 1) for n in back for i in range(p)],
    )


@published("chronos-offload", "Lin et al. 2025, section 5.1", least=2, most=None, chunks=2)
def chronos_offload(problem: Problem, chunks: int = 1, leaving: int = 0) -> Schedule:
    """Chronos-Offload (section 5.1): Chronos-Pipe with the optimizers of the `chunks` deepest chunks on the host.

    Their weights get gradients first and are used last: these leave, are applied and come back as parameters while
    the other chunks drain this iteration's pipeline and fill the next one's. For v = 2 and stages alike parameters may
    take p forwards of a chunk, gradients and update p of its backwards (Eq. 5 and 7 allow less); what they take beyond
    that makes the iteration longer. What is saved, two thirds of these chunks' model state, is no activation.
    """
    devices, v = count_devices(problem), count_chunks(problem)
    if not 1 <= chunks < v:
        raise InputError(f"chunks = {chunks}: expected 1 to {v - 1}, the shallowest chunk of a device is updated there")
    return with_host_updates(chronos(problem, leaving), range((v - chunks) * devices, v * devices))
