"""`ByteCounts`: what a rank holds after each op, by live storages, beside what the certificates allow."""

from __future__ import annotations

import logging

import torch

from optpipe.model.ops import Op
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.handler import Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import Plan

log = logging.getLogger("optpipe.runtime")


class ByteCounts:
    """Bytes are counted in traced steps, in the first step by a plan, and after `forget`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._counted: Plan | None = None  # the last one whose bytes were counted
        self._logged: set[str] = set()  # digests of the plans whose excess is in the log
        self._certified: dict[tuple[str, bool, bool], tuple[int, int]] = {}  # plan, evaluating, reduced

    def are_wanted(self, plan: Plan, batch: Batch, evaluating: bool) -> bool:
        """A `timed` step has a plan of its own, so that its bytes are counted only after `forget`."""
        is_new = self._counted is None if batch.timed else plan is not self._counted
        return not evaluating and (batch.trace or is_new)

    def forget(self, learned: bool) -> None:
        """The sizes of what passes between the stages have changed; some were `learned`."""
        if learned:
            self._counted = None
        self._certified.clear()

    def count(self, step: StepRecord, op: Op, handler: Handler, certified: int) -> None:
        """After an op, in a step that is counted or traced."""
        if step.counting or (step.tracing and step.evaluating):
            step.gathered_bytes = max(step.gathered_bytes or 0, self._rank.replicas.held_bytes())
        if step.counting:
            step.count(op, None if handler.held_bytes is None else handler.held_bytes(op), certified)
        if step.tracing:
            step.allocated.append(self._allocated())

    def end(self, step: StepRecord) -> dict[str, int | None]:
        """After the last op: the peaks that the report has, and what the plan allows. Logs once for each plan that
        more was held than certified."""
        rank, plan = self._rank, step.plan
        if step.counting:
            self._counted = plan
        if step.excess is not None and plan.digest not in self._logged:
            self._logged.add(plan.digest)
            op, held, certified = step.excess
            log.warning("rank %s holds %d bytes after %s, %d are certified", rank.team.name, held, op, certified)
        messages, gathered = self._certified_peaks(step)
        return {
            "host_peak_bytes": rank.pool.peak_bytes,
            "buffer_peak_bytes": rank.messages.peak_bytes,
            "buffer_certified_bytes": messages,
            "gathered_certified_bytes": gathered,
            "cuda_peak_bytes": torch.cuda.max_memory_allocated(rank.device) if rank.device.type == "cuda" else None,
        }

    def _certified_peaks(self, step: StepRecord) -> tuple[int, int]:
        """Of messages, and of gathered parameters with their gradients. How large these are, a counted step finds."""
        plan, replicas, evaluating = step.plan, self._rank.replicas, step.evaluating
        reduced: dict[Op, int] = {}
        for feature in self._rank.features if not evaluating else ():
            reduced |= feature.reduced_before(plan)
        key = plan.digest, evaluating, bool(reduced)
        if step.counting or key not in self._certified:
            self._certified[key] = (
                plan.message_peak(self._rank.message_bytes, evaluating),
                plan.gathered_peak(replicas.parameter_bytes, replicas.gradient_bytes, evaluating, reduced),
            )
        return self._certified[key]

    def _allocated(self) -> int | None:
        """What `torch.cuda.memory_allocated` tells. That first makes a flat table of all statistics, which takes the
        host as long as an op."""
        if self._rank.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats_as_nested_dict(self._rank.device)["allocated_bytes"]["all"]["current"])
