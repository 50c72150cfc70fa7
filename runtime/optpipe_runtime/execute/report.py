"""The report of a step: losses, times, peak bytes, and on request a trace of its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from optpipe.model.ops import Op
from optpipe_runtime.execute.batch import Cut
from optpipe_runtime.execute.gradients import Windows
from optpipe_runtime.lowering.plan import Message, Plan
from optpipe_runtime.memory.engines import Clock, Handle


class OpTime(NamedTuple):
    """When an op ran on this rank, since the step began, and what the rank held after it.

    A compute op starts when its message is there and ends when its result has been handed over. The times of a transfer
    are those of its copies. `held_bytes` are those of activations, in the order of the host and of CUDA's allocator;
    `certified_bytes` are how many the certificate allows, `allocated_bytes` `torch.cuda.memory_allocated` (CUDA only).
    """

    op: Op
    start_ms: float
    end_ms: float
    held_bytes: int
    certified_bytes: int
    allocated_bytes: int | None


class Excess(NamedTuple):
    """More bytes of activations than certified: the op after which the difference was largest."""

    op: Op
    held_bytes: int
    certified_bytes: int


@dataclass(frozen=True)
class StepReport:
    """One step on one rank. Bytes are peaks over the step.

    Bytes of activations are counted by live storages after every op, which takes the host the longer the more tensors
    are saved. So they are counted in traced steps, in the first step by a schedule, and in the first after the stages
    were learned again.

    Attributes
    ----------
    losses
        By micro-batch, of those whose route ends on this rank; None if there are none.
    step_ms
        From the beginning of this rank's program to its end, without the optimizer.
    peak_activation_bytes
        What `certify` bounds: saved tensors, and what waits for W. None if the step was not counted.
    host_peak_bytes
        Offloaded bytes on the host.
    buffer_peak_bytes
        Receive buffers and sends under way. They are no part of the activations.
    buffer_certified_bytes
        How many of these bytes the schedule allows (`Plan.message_peak`).
    cuda_peak_bytes
        `torch.cuda.max_memory_allocated` of the step; None on CPU.
    gathered_peak_bytes
        Parameters that FSDP2 has gathered for the step, and their whole gradients. None if the step was not counted.
    gathered_certified_bytes
        How many of these bytes the schedule allows (`Plan.gathered_peak`).
    excess
        The op after which the rank held most above the certificate; None if it never did, or was not counted.
    trace
        The times of all ops, if asked for.
    version
        How many schedules had been swapped in.
    outputs
        If asked for, what the module at the end of the route returned, detached, by micro-batch; None where no route
        ends. They are no part of the activations that are counted.
    weights
        How much each of the losses counts; None: all the same.
    grad_norm
        With `post_validate`, the norm of all gradients at the last optimizer step before this step: not finite if that
        was skipped. Else None.
    """

    losses: list[float] | None
    step_ms: float
    peak_activation_bytes: int | None
    host_peak_bytes: int
    buffer_peak_bytes: int
    buffer_certified_bytes: int
    cuda_peak_bytes: int | None
    gathered_peak_bytes: int | None = None
    gathered_certified_bytes: int = 0
    excess: Excess | None = None
    trace: tuple[OpTime, ...] = ()
    version: int = 0
    grad_norm: float | None = None
    outputs: list[Any] | None = None
    weights: tuple[float, ...] | None = None

    @property
    def loss(self) -> float | None:
        """The mean over those micro-batches, by `weights` if there are some."""
        if not self.losses:
            return None
        if self.weights is None:
            return sum(self.losses) / len(self.losses)
        return sum(weight * loss for weight, loss in zip(self.weights, self.losses, strict=True)) / sum(self.weights)


class OpRecord(NamedTuple):
    """One op that was issued. Marks are those of the step's clock."""

    op: Op
    start: Any
    end: Any
    copies: Sequence[Handle]


@dataclass
class StepRecord:
    """What one step gathers while it runs."""

    plan: Plan
    batch: Cut
    evaluating: bool
    tracing: bool  # whether times of ops are noted
    counting: bool  # and bytes
    mark: Callable[[], Any]  # a mark of the clock, if the step is traced
    will_count: Callable[[], bool]  # see `Executor.run`
    windows: Windows  # of gradients; none in an evaluation

    results: dict[int, Any] = field(default_factory=dict)  # what the last modules return, by micro-batch, if asked for
    losses: dict[int, Tensor] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)  # stages that have run a forward
    awaited: Message | None = None  # while the host waits for it
    ops: list[OpRecord] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # bytes after each op
    allocated: list[int | None] = field(default_factory=list)
    peak_bytes: int = 0
    gathered_bytes: int | None = None  # of FSDP2's parameters and gradients, at most
    excess: Excess | None = None
    _held: dict[tuple[int, int], int] = field(default_factory=dict)
    _now: int = 0

    def count(self, op: Op, held: int | None, certified: int) -> None:
        """Notes what the op's stage and micro-batch hold after it; None for no change."""
        if held is not None:
            key = op.stage, op.microbatch
            self._now += held - self._held.get(key, 0)
            self._held[key] = held
            self.peak_bytes = max(self.peak_bytes, self._now)
        self.held.append(self._now)
        above = self._now - certified
        if above > 0 and (self.excess is None or above > self.excess.held_bytes - self.excess.certified_bytes):
            self.excess = Excess(op, self._now, certified)

    def report(self, clock: Clock, begun: Any, ended: Any, peaks: Mapping[str, Any]) -> StepReport:
        """The report of a step that ran between these two marks. `peaks` are its fields that `ByteCounts` has."""
        return StepReport(
            losses=[float(self.losses[j]) for j in sorted(self.losses)] if self.losses else None,
            step_ms=clock.ms(begun, ended),
            peak_activation_bytes=self.peak_bytes if self.counting or self.evaluating else None,
            gathered_peak_bytes=self.gathered_bytes,
            excess=self.excess,
            trace=tuple(self._trace(clock, begun)) if self.ops and self.ops[0].start is not None else (),
            outputs=[self.results[j] for j in sorted(self.results)] if self.results else None,
            **peaks,
        )

    def _trace(self, clock: Clock, begun: Any) -> Iterator[OpTime]:
        held = zip(self.held, self.plan.certified_bytes, strict=True) if self.held else repeat((0, 0))
        allocations = self.allocated or repeat(None)
        for (op, start, end, copies), counted, allocated in zip(self.ops, held, allocations, strict=False):
            spans = [(copy.start, copy.end) for copy in copies] or [(start, end)]
            starts, ends = [clock.ms(begun, a) for a, _ in spans], [clock.ms(begun, b) for _, b in spans]
            yield OpTime(op, min(starts), max(ends), *counted, allocated)
