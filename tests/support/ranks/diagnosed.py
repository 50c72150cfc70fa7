"""A training whose stages sleep as long as their layers say, traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from optpipe.anytime import solve
from optpipe.model.ops import Op
from optpipe_runtime.fidelity import paced
from optpipe_runtime.pipeline import Pipeline

LAYER_MS = 5.0  # of F, of B and of W
MICROBATCHES, STEPS = 8, 4


class Traced(NamedTuple):
    """A step on a rank."""

    step_ms: float
    ops: list[tuple[Op, float, float]]


def train(layers: Sequence[int], head: int) -> list[Traced]:
    """Collective: steps of 1F1B with so many layers in each stage; the head takes as long as `head` layers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each_ms = LAYER_MS * (layers[rank] + head * (rank == ranks - 1))
    stage = paced.Stage(paced.Times(each_ms, each_ms, each_ms, 1.0))
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    reports = []
    with Pipeline({rank: stage}, list(range(ranks)), paced.loss, MICROBATCHES) as pipe:
        pipe.problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(pipe.problem, method="1f1b").schedule if rank == 0 else None)
        for _ in range(1 + STEPS):
            dist.barrier()
            reports.append(pipe.step(x, x, trace=True))
    return [
        Traced(report.step_ms, [(each.op, each.start_ms, each.end_ms) for each in report.trace])
        for report in reports[1:]
    ]
