"""The schedules that all others are compared with: GPipe and 1F1B, the latter plain, interleaved and recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optpipe.errors import InputError
from optpipe.formats import megatron
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.system import (
    count_chunks,
    count_devices,
    even_groups,
    in_order,
    published,
    recomputed_stages,
)


@published("gpipe", "Huang et al. 2019; survey, section on GPipe")
def gpipe(problem: Problem) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards.

    Bubble (p-1)/(p-1+m) of the time; m activations on every device.
    """
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for s, stage in enumerate(problem.stages):
        lists[stage.device] = [Op(kind, s, j) for kind in (Kind.F, Kind.BW) for j in range(problem.microbatches)]
    return in_order(problem, lists)


@published("1f1b", "Narayanan et al. 2021 (PipeDream-Flush); survey")
def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021): stage s of p begins with p - s - 1 forwards.

    Then it runs one forward, one backward. GPipe's bubble; p - s activations at most.
    """
    return _by_rank(problem, megatron.order)


@published("interleaved", "Narayanan et al. 2021 (Megatron-LM), section 2.2; survey", least=2, most=None, chunks=2)
def interleaved(problem: Problem) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): groups of p micro-batches pass v stages a device in order.

    Rank i begins with 2(p-i-1) + (v-1)p forwards, then runs one forward, one backward. Bubble (p-1)(F+B+W)/v with a
    device's whole times; vp + p - 1 activations, (1 + (p-1)/(pv))·M.

    Megatron wants m to be a multiple of p. Where it is not, the groups are as even as they can be and none is smaller
    than p, so that the bubble stays; the warm-up is that of the largest, g, and rank 0 holds (v-1)g + 2p - 1. (A
    smaller last group would deadlock: the backwards of one group wait for forwards of the next.) Fewer than p are one
    group.
    """
    return _by_rank(problem, megatron.order)


@published("combined-1f1b", "megatron-core 0.16.1, combined_1f1b.py", least=1, most=None, chunks=2)
def combined(problem: Problem) -> Schedule:
    """Megatron-core's combined 1F1B (`overlap_moe_expert_parallel_comm`): `interleaved` with one forward more in the
    warm-up, so that in between each forward runs beside a backward of another micro-batch, whose all-to-all it hides.

    (p-1+w)(F+B+W) + (vm-w)·F&B with w = (v-1)p + 1, F&B a pair of one chunk's ops; vp + p activations. Megatron itself
    asks for two chunks or more unless p = 1. Raises InputError if the problem has no `overlap_factor`.
    """
    if problem.overlap_factor is None:
        raise InputError("overlap_factor is missing: combined-1f1b runs forwards beside backwards")
    return _by_rank(problem, megatron.combined_order)


@published("interleaved-recompute", "PipeOffload, Wan et al. 2025, section 5.5", least=2, most=None, chunks=2)
def interleaved_recomputed(problem: Problem, recomputed: int | None = None, level: int = 0) -> Schedule:
    """Interleaved 1F1B with activation checkpointing, a baseline of Wan et al. (1F1B-I-R) and of Lin et al. 2025.

    The `recomputed` shallowest chunks, by default all, are recomputed by this `level` of their stages right before
    their backward: C longer each time, and all but one of their activations are checkpoints.

    Raises InputError if a device has fewer chunks, or one of their stages cannot be recomputed by this level.
    """
    chunks = count_chunks(problem) if recomputed is None else recomputed
    shallow = recomputed_stages(problem, chunks, level, "interleaved-recompute")
    return _recomputing(interleaved(problem), shallow, level)


def _by_rank(problem: Problem, order: Callable[[int, int, Sequence[range]], Sequence[Sequence[Op | Pair]]]) -> Schedule:
    """The schedule with this order of ops of each rank of looped stages, in even groups."""
    p = count_devices(problem)
    lists: list[Sequence[Op | Pair]] = [[] for _ in problem.devices]
    by_rank = order(p, count_chunks(problem), even_groups(problem.microbatches, p))
    for stage, ops in zip(problem.stages, by_rank, strict=False):  # the first chunk of each rank
        lists[stage.device] = ops
    return in_order(problem, lists)


@published("1f1b-recompute", "survey, section on activation checkpointing")
def recomputed(problem: Problem, every: int = 1, level: int = 0) -> Schedule:
    """1F1B with activation checkpointing (survey, section on it).

    Of every n-th micro-batch, the same ones on all stages, only the checkpoints stay after its forward, and the rest is
    recomputed by this `level` of its stage right before its backward. (The survey drops every n-th layer: one more
    level here.) (m+p-1)(F+B+W) + ⌊m/n⌋·C; stage s holds one activation, and of p - s - 1 more ⌊(p-s-1)/n⌋ as
    checkpoints.

    Raises InputError if a stage cannot be recomputed by this level, or if `every` is 0.
    """
    if every < 1:
        raise InputError(
            f"every = {every}: 1f1b-recompute computes every micro-batch again (1), every second (2), and so on"
        )
    return _recomputing(one_f_one_b(problem), recomputed_stages(problem, 1, level, "1f1b-recompute"), level, every)


def _recomputing(schedule: Schedule, stages: range, level: int, every: int = 1) -> Schedule:
    """The schedule with a C by this level right before each backward of these stages, of every n-th micro-batch."""
    lists: list[list[Op]] = []
    for program in schedule.programs:
        lists.append([])
        for op in program.ops():
            if op.kind is Kind.BW and op.stage in stages and (op.microbatch + 1) % every == 0:
                lists[-1].append(Op(Kind.C, op.stage, op.microbatch, level))
            lists[-1].append(op)
    return in_order(schedule.problem, lists)
