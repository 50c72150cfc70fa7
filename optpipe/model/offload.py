"""k: whether there is time to offload (PipeOffload, Wan et al. 2025, section 1). If k is at most 1, every activation
can leave and come back while the device computes."""

from __future__ import annotations

import numpy as np

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem


def offload_ratio(problem: Problem) -> list[float | None]:
    """k of each stage: the round trip of its activation over the time of its F, B and W.

    None if the stage cannot offload; infinity if its transfers take time and its compute takes none. Of different
    micro-batches all count together. Waiting for other devices on a shared link is not counted.
    """
    costs = problem.costs
    work_ms = costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=(0, 2)) / problem.microbatches
    away_ms = costs.ms[[Kind.O, Kind.R]].sum(axis=(0, 2)) * costs.parts / problem.microbatches
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(away_ms > 0, away_ms / work_ms, 0.0).tolist()
    return [ratio if possible else None for ratio, possible in zip(ratios, costs.can_offload.tolist(), strict=True)]


def estimated_offload_ratio(hidden: float, sequence: float, flops: float, bytes_per_s: float) -> float:
    """k of a transformer layer before there is any measurement (Eq. 1): 10 / (3(6h + s)) · Bc / Bo.

    Of an activation 20·b·s·h bytes are offloaded; what is cheap to compute again is not. There and back they take
    40·b·s·h / Bo, and F, B and W take 12·b·s·h(6h + s) / Bc.

    The paper says that k ≤ 1 beyond a hidden size of 8k or a sequence of 16k. The second half is loose: with its
    220 TFLOP/s and 15 GB/s k is 0.974 at hidden 8192 and sequence 1024, but 1.194 at hidden 4096 and sequence 16384,
    where it takes a sequence of 24,313.

    Parameters
    ----------
    hidden, sequence
        The layer's sizes h and s.
    flops
        Bc, the computing speed reached, in operations per second.
    bytes_per_s
        Bo, the link's bandwidth with both directions busy.
    """
    return 10 / (3 * (6 * hidden + sequence)) * flops / bytes_per_s
