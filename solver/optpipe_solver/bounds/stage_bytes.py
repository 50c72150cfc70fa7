"""`StageBytes`: what one activation of a stage holds on its device from step to step."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

F, B, W, BW, C = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C


class LevelBytes(NamedTuple):
    """The bytes of an activation that is recomputed by one level."""

    checkpoint: int  # between F and C
    recompute: int  # while C runs
    peak: int  # the most from F to the end of the backward
    parts: list[int]  # of each part of the checkpoint that can leave


class StageBytes(NamedTuple):
    """The bytes that an activation holds, by the memory rule of `optpipe.evaluate.effects`.

    Where there is a choice, B and W or BW, it is the least of both: whatever is chosen, a step holds no less.
    """

    forward: int  # while F runs
    stays: int  # between F and the backward, if nothing leaves
    backward: int  # while B runs, or BW
    waiting: int  # between B and W
    weight: int  # while W runs, or BW
    waiting_peak: int  # the most from the end of B to that of W
    peak: int  # the most from F to the end of the backward
    most: int  # the most at once, whatever is chosen
    parts: list[int]  # of each part that can leave, if it is not recomputed
    levels: list[LevelBytes]


def stage_bytes(problem: Problem, microbatch: int) -> list[StageBytes]:
    """Return (S,) the bytes of a micro-batch's activation of each stage."""
    effects = Effects(problem)
    takes, frees = (amounts[..., microbatch].tolist() for amounts in (effects.takes, effects.frees))
    again = [[table[..., microbatch].tolist() for table in tables] for tables in effects.by_level]
    by_stage = []
    for s, stage in enumerate(problem.stages):
        forward, stays = takes[F][s], takes[F][s] - frees[F][s]
        fused, split = stays + takes[BW][s], stays + takes[B][s]
        waiting = split - frees[B][s]
        waiting_peak = waiting + takes[W][s]
        peak = max(forward, min(fused, split))
        levels = []
        for level, (of, (again_takes, again_frees)) in enumerate(zip(stage.all_levels, again, strict=False)):
            checkpoint = again_takes[F][s] - again_frees[F][s]
            recompute = checkpoint + again_takes[C][s]
            sizes = effects.parts_by_level[level][s, microbatch, : stage.offload_parts].tolist()
            parts = sizes if of.can_offload else []
            levels.append(LevelBytes(checkpoint, recompute, max(peak, recompute), parts))
        most = max(peak, *(level.peak for level in levels), fused, split, waiting_peak)
        backwards = min(split, fused), waiting, min(waiting_peak, fused), waiting_peak
        parts = effects.parts[s, microbatch, : stage.offload_parts].tolist()
        by_stage.append(StageBytes(forward, stays, *backwards, peak, most, parts, levels))
    return by_stage
