"""Where a candidate's iteration goes: what `optpipe plan --explain` compares."""

from __future__ import annotations

from statistics import mean

from optpipe_solver.planner.candidate import Candidate

NAMES = {
    "matmuls": "matmuls",
    "attention": "attention",
    "passes": "norms, losses and the like",
    "host": "launching kernels",
    "messages": "messages within stages",
    "recomputing": "recomputing",
}


def parts(candidate: Candidate) -> dict[str, float]:
    """Divide the iteration into ms that add up to it.

    Those of `NAMES` are the means over devices of what all ops together take; `uneven stages` is how much longer the
    busiest device computes, `waiting` how long it does not. Without a schedule `waiting` is what the bound says.
    """
    estimate, m = candidate.estimate, candidate.estimate.run.microbatches
    busy = estimate.busy_ms
    longest = max(busy)
    divided = {
        title: m * mean(getattr(times, field) for times in estimate.device_times) for field, title in NAMES.items()
    }
    again = 0.0  # what the schedule recomputes beside
    if candidate.schedule:
        again = candidate.schedule.timeline.busy_ms()[busy.index(longest)] - m * longest
    divided["recomputing"] += again
    return divided | {
        "uneven stages": m * (longest - mean(busy)),
        "waiting": candidate.least_ms - estimate.after_ms - m * longest - again,
        "reducing gradients": estimate.reduction_ms,
        "the optimizer": estimate.optimizer_ms,
    }
