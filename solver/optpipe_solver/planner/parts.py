"""Where a candidate's iteration goes: what `optpipe plan --explain` compares."""

from __future__ import annotations

from dataclasses import replace

from optpipe.transformer.estimate import Estimate
from optpipe_solver.planner.candidates import Candidate

AT_ONCE = 1e21  # bytes per second: a link that takes no time


def parts(candidate: Candidate) -> dict[str, float]:
    """Divide the iteration into ms that add up to it.

    The first four are the means over devices of what all ops of one kind take; `uneven stages` is how much longer the
    busiest device computes, `waiting` how long it does not. Without a schedule `waiting` is what the bound says.
    """
    whole, m = candidate.estimate, candidate.estimate.run.microbatches
    links = {"link_bytes_per_s": AT_ONCE, "network_bytes_per_s": AT_ONCE}
    alone = replace(whole, gpu=whole.gpu.model_copy(update=links))
    plain = replace(alone, run=whole.run.model_copy(update={"recompute": "none"}))
    longest = max(whole.busy_ms)
    again = 0.0  # what the schedule recomputes beside
    if candidate.schedule:
        again = candidate.schedule.timeline.busy_ms()[whole.busy_ms.index(longest)] - m * longest
    reduction = whole.reduction_ms
    return {
        "computing": m * _mean(plain),
        "recomputing": m * (_mean(alone) - _mean(plain)) + again,
        "messages within stages": m * (_mean(whole) - _mean(alone)),
        "uneven stages": m * (longest - _mean(whole)),
        "waiting": candidate.least_ms - reduction - m * longest - again,
        "reducing gradients": reduction,
    }


def _mean(estimate: Estimate) -> float:
    return sum(estimate.busy_ms) / len(estimate.busy_ms)
