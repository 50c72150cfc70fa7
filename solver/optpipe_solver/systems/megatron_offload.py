"""Megatron-core's own offload: what modules of its layers save waits on the host, in its 1F1B or interleaved 1F1B.

Its code is the paper (0.19.2, fine_grained_activation_offload.py). Of each layer every module that offloads is a group.
It leaves after its forward, and the backward of each group reloads one further group of its chunk, then of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.formats import megatron
from optpipe.lift import grain
from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from optpipe.transformer.offload import AROUND, Group
from optpipe_solver.systems.system import count_devices

Visit = tuple[int, int]  # of a chunk by a micro-batch


class Chunk(NamedTuple):
    """A chunk of a rank: its stages, and its groups in the order in which their modules begin, each with its stage."""

    stages: Sequence[int]
    saved: Sequence[tuple[int, Group]]

    @property
    def last(self) -> dict[str, int]:
        """The last group of each module."""
        return {group.module: n for n, (_, group) in enumerate(self.saved)}


def offloading(
    problem: Problem, groups: Sequence[Sequence[Group]], ms_of_byte: float, fraction: float = 1.0, delta: float = 0.0
) -> Schedule:
    """Megatron's order of ops with its policy for the groups of each stage, which become the problem's offloads.
    Consecutive stages of a device, such as single layers, are one chunk.

    A group begins to come back with the backward that reloads it. It frees its bytes as soon as it has left, so that no
    op waits for that where all last as long as the problem says; Megatron itself does not wait either.

    Raises InputError if Megatron has no such chunks, needs more micro-batches, or would stop.
    """
    runs = [(d, [*run]) for d, run in groupby(range(len(problem.stages)), lambda s: problem.stages[s].device)]
    p, m, v = count_devices(problem), problem.microbatches, len(runs) // count_devices(problem)
    if len(problem.all_routes) > 1 or [d for d, _ in runs] != [*range(p)] * v:
        raise InputError("stages: Megatron has as many chunks on each rank, and ranks take turns")
    if problem.shared_links:
        raise InputError(f"devices share the link {min(problem.shared_links)!r}: Megatron orders no copies of several")
    programs, leaving = list[Program](), dict[Visit, list[Group]]()
    for r, order in enumerate(megatron.order(p, v, megatron.in_groups(m, megatron.least_group(p, v, m)))):
        chunks = {c: Chunk(runs[c][1], [(s, g) for s in runs[c][1] for g in groups[s]]) for c in range(r, p * v, p)}
        backward = [(op.stage, op.microbatch) for op in order if op.kind is Kind.BW]
        stays = staying(chunks, backward, fraction, r * delta)
        programs.append(Program.from_items(_program(order, chunks, backward, stays)))
        for c, j in backward:
            for (s, group), stay in zip(chunks[c].saved, stays[c, j], strict=True):
                leaving.setdefault((s, j), []).extend([group] * (not stay))
    stages = []
    for s, stage in enumerate(problem.stages):
        left = [leaving.get((s, j), []) for j in range(m)]
        ms = tuple(ms_of_byte * sum(group.copied for group in each) for each in left)
        freed = tuple(int(sum(group.freed for group in each)) for each in left)
        offload = {"offload_ms": ms, "reload_ms": ms, "offload_bytes": freed, "offload_parts": 1} if groups[s] else {}
        stages.append(stage.model_copy(update=offload))
    return _dropping_early(Schedule(problem.replace(stages=stages), tuple(programs)))


def staying(
    chunks: Mapping[int, Chunk], backward: Sequence[Visit], fraction: float, on_device: float
) -> dict[Visit, list[bool]]:
    """Which groups stay (`post_warmup_callback`): the last one of each module in the first backward, the first ones of
    so many bytes, and the latest of a chunk's others but for a `fraction`."""
    stays = {(c, j): [False] * len(chunks[c].saved) for c, j in backward}
    margin = max(len(chunk.last) for chunk in chunks.values())
    last: dict[str, tuple[Visit, int]] = {}
    for visit in reversed(backward):
        last |= {module: (visit, n) for module, n in chunks[visit[0]].last.items()}
    for visit, n in list(last.values())[:margin]:
        stays[visit][n] = True
    for visit in backward:
        copied, stay = [group.copied for _, group in chunks[visit[0]].saved], stays[visit]
        for n, nbytes in enumerate(copied):
            if not stay[n] and on_device > 0:
                on_device -= nbytes
                stay[n] = True
        eligible = [n for n, nbytes in enumerate(copied) if nbytes and not stay[n]]
        for n in eligible[len(eligible) - int(len(eligible) * (1 - fraction)) :]:
            stay[n] = True
    return stays


def _program(
    order: Sequence[Op], chunks: Mapping[int, Chunk], backward: Sequence[Visit], stays: dict[Visit, list[bool]]
) -> list[Op]:
    """A rank's ops, drops right before reloads. Groups that stay only since their chunk's backward is the next one
    (`should_bulk_offload`) become such in `stays`."""
    ops, passed, left = list[Op](), 0, set[tuple[int, int]]()  # stages and micro-batches
    away = dict[Visit, list[int]]()  # the stages of the groups that have left
    place = {visit: n for n, visit in enumerate(backward)}
    count = {s: sum(of == s for of, _ in chunk.saved) for chunk in chunks.values() for s in chunk.stages}

    def reload(stage: int, j: int) -> None:
        if (stage, j) in left:
            left.remove((stage, j))
            ops.extend((Op(Kind.D, stage, j), Op(Kind.R, stage, j)))

    for kind, c, j, _ in order:
        visit, chunk = (c, j), chunks[c]
        if kind is Kind.F:
            for module, n in chunk.last.items():
                if next(v for v in backward[passed:] if module in chunks[v[0]].last) == visit:
                    stays[visit][n] = True
            _require_following(chunk, stays[visit], visit)
            leaving = [saved for saved, stay in zip(chunk.saved, stays[visit], strict=True) if not stay]
            away[visit] = [s for s, _ in leaving]
            left.update((s, j) for s, group in leaving if group.copied)
            for s in chunk.stages:
                ops.append(Op(Kind.F, s, j))
                ops.extend([Op(Kind.O, s, j)] * ((s, j) in left))
            continue
        passed = place[visit] + 1
        after = next((v for v in backward[passed:] if chunks[v[0]].saved), None)
        for s in reversed(chunk.stages):
            later = list[Visit]()
            for _ in range(count[s]):
                if waiting := away[visit]:
                    reload(waiting.pop(), j)
                elif after and (waiting := away.get(after, [])):  # its forward has passed
                    later.append((waiting.pop(), after[1]))
            reload(s, j)  # unless it is back
            for each in later if count[s] > 1 else ():  # else the only group's backward ends with the stage's
                reload(*each)
            ops.append(Op(Kind.BW, s, j))
            for each in later:
                reload(*each)
    return ops


def _require_following(chunk: Chunk, stays: Sequence[bool], visit: Visit) -> None:
    """Raises InputError where Megatron 0.19.2 takes a chunk for finished (`finish_all_groups`): a group begins when all
    before it stay and have ended. What saves its tensors then is the next chunk, and the backward stops."""
    for n, (s, group) in enumerate(chunk.saved[1:], 1):
        if not stays[n - 1]:
            return
        if not any(of == s and group.module in AROUND.get(outer.module, ()) for of, outer in chunk.saved[:n]):
            raise InputError(
                f"chunk {visit[0]}, micro-batch {visit[1]}: its first {n} groups stay, and then megatron-core 0.19.2 "
                "stops with a chunk mismatch; one module, or more layers a chunk, would be right"
            )


def _dropping_early(schedule: Schedule) -> Schedule:
    """The same, each drop as soon as its offload has ended, before an op that starts no earlier."""
    rows, timeline = schedule.compiled.rows, schedule.timeline
    drops, compute = np.flatnonzero(rows.of_kinds(Kind.D)), rows.of_kinds(*COMPUTE)
    key = np.arange(len(rows), dtype=np.float64)
    offloads = schedule.compiled.index.parts(Kind.O)[rows.stage[drops], rows.microbatch[drops], rows.part[drops]]
    for d in range(len(schedule.programs)):
        computing = np.flatnonzero(compute & (rows.device == d))
        own, out = (each[rows.device[drops] == d] for each in (drops, offloads))
        ended = np.searchsorted(timeline.start[computing], timeline.end[out] - grain(timeline.start))
        first = np.maximum(ended, np.searchsorted(computing, out))
        key[own] = np.minimum(own, computing[np.minimum(first, len(computing) - 1)] - 0.5)
    order = np.argsort(key, kind="stable")
    return Schedule.in_order(schedule.problem, rows.table[order], rows.device[order], schedule.method)
