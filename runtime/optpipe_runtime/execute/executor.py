"""Runs a plan: one training step of this rank, op by op in program order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optpipe.errors import InputError, OptPipeError
from optpipe.model.ops import BACKWARD, OPTIMIZER, Kind, Op
from optpipe_runtime.execute.lowering import Action, Message, Plan
from optpipe_runtime.execute.stage import Passage, Spec, Tensors
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.memory.pool import Ticket
from optpipe_runtime.ranks.rank import Rank

log = logging.getLogger("optpipe.runtime")

STILL = OPTIMIZER | {
    Kind.O,
    Kind.E,
}  # ops after which the device holds what it held before: copies begin, or it is model state


class OpTime(NamedTuple):
    """When an op ran, in ms since the step began on this rank. Compute starts when its message is there and ends when
    what it made has been handed over; transfers are their copies.

    Behind it what the rank held then, in the order of the host, and with it of CUDA's allocator: bytes of activations,
    how many are certified, and on CUDA `torch.cuda.memory_allocated`.
    """

    op: Op
    start_ms: float
    end_ms: float
    held_bytes: int
    certified_bytes: int
    allocated_bytes: int | None


class Excess(NamedTuple):
    """More than certified: the op after which it was most."""

    op: Op
    held_bytes: int
    certified_bytes: int


@dataclass(frozen=True)
class StepReport:
    """One step on one rank. Bytes are peaks over the step, counted by live storages after every op."""

    losses: list[float] | None  # by micro-batch, of those whose route ends on this rank
    step_ms: float
    peak_activation_bytes: int  # what `certify` bounds: saved tensors, and what waits for W
    host_peak_bytes: int
    buffer_peak_bytes: int  # receive buffers and sends under way; no part of the activations
    cuda_peak_bytes: int | None  # torch.cuda.max_memory_allocated of the step
    excess: Excess | None = (
        None  # where any op held more than certified; nothing is allowed for: what is counted is no workspace
    )
    trace: tuple[OpTime, ...] = ()
    version: int = 0  # how many schedules had been swapped in

    @property
    def loss(self) -> float | None:
        """The mean over those micro-batches."""
        return sum(self.losses) / len(self.losses) if self.losses else None


class Executor:
    """Holds this rank's stages, mail and host pool, and runs plans on them."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._layout, self._stages, self._device = rank, rank.layout, rank.stages, rank.device
        self._mail, self._pool, self._peers, self._link = rank.mail, rank.pool, rank.peers, rank.link
        self._clock, self._hosts = Clock(rank.device), rank.host_optimizers
        self._unfinished: Sequence[Action] = ()  # of a step that failed here
        self._exceeding: set[str] = set()  # digests of the plans whose excess is in the log

    @property
    def idle(self) -> bool:
        """Between steps: nothing is kept that a plan put there. Only then a plan may be swapped."""
        return self._mail.idle and self._peers.idle and all(stage.idle for stage in self._stages.values())

    def run(self, plan: Plan, inputs: Any, targets: Any, trace: bool = False, evaluating: bool = False) -> StepReport:
        """One step: losses, and gradients of the mean loss added to the parameters' `.grad`; only losses where
        `evaluating`.

        `inputs` are needed where a route begins, `targets` where one ends: a tensor or a tuple of tensors, the whole
        batch.
        """
        if not self.idle:
            raise OptPipeError("the step before failed and left its messages behind: make a new Pipeline")
        batch = self._cut(inputs, "inputs") if self._rank.takes_inputs else []
        answers = self._cut(targets, "targets") if self._rank.takes_targets else []
        for s, stage in self._stages.items():
            staying = [*(batch[0] if s in self._layout.first else ()), *(answers[0] if s in self._layout.last else ())]
            stage.start_step(staying, plan.problem.stages[s].offload_parts)
        self._mail.start_step()
        self._pool.start_step()
        if not evaluating:
            self._peers.start_step(plan.guests)
            self._link.start_step(plan.turns)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

        step = _Step(plan, batch, answers, evaluating, self._clock.mark if trace else _no_mark)
        begun = self._clock.mark()
        at: Op | str = "the beginning of the step"
        actions, done = plan.forwards if evaluating else plan.actions, 0
        try:
            self._begin(step)
            for action, certified in zip(actions, plan.certified_bytes, strict=False):
                at = action.op
                for message, source in action.post:
                    self._mail.post(message, source, self._specs(message))
                self._run(step, action)
                if not evaluating:
                    step.count(action.op, None if action.op.kind in STILL else self._held_bytes(action.op), certified)
                if trace:
                    step.allocated.append(self._allocated_bytes())
                done += 1
            at = "the end of the step"
            self._end(step)
        except BaseException as error:
            error.add_note(self._where(step, at, error))
            self._unfinished = actions[done:]
            raise
        ended = self._clock.mark()
        self._clock.settle()
        assert self.idle, "a step leaves nothing behind"
        if step.excess is not None and plan.digest not in self._exceeding:
            self._exceeding.add(plan.digest)
            op, held, certified = step.excess
            log.warning("rank %d holds %d bytes after %s, %d are certified", self._rank.number, held, op, certified)
        return StepReport(
            losses=[float(step.losses[j]) for j in sorted(step.losses)] if step.losses else None,
            step_ms=self._clock.ms(begun, ended),
            peak_activation_bytes=step.peak_bytes,
            host_peak_bytes=self._pool.peak_bytes,
            buffer_peak_bytes=self._mail.peak_bytes,
            cuda_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
            excess=step.excess,
            trace=tuple(step.trace(self._clock, begun)) if trace else (),
        )

    def abandon(self) -> None:
        """After a step that failed here, from the op at which it did: lets the other ranks finish theirs, and forgets
        it.

        What they wait for is sent as zeros, what they send is received. Not for a step that updates parameters on the
        host.
        """
        away: list[Ticket] = []
        for k, action in enumerate(self._unfinished):
            kind, s, j, _ = action.op
            for message, source in action.post:
                self._mail.post(message, source, self._specs(message))
            if action.receives is not None:
                self._mail.discard(action.receives)
            if kind in (Kind.A, Kind.V):
                self._make_room(None, action.op)
            elif kind in (Kind.O, Kind.R) and k:  # the op that failed had its turn
                with self._link.turn(action.op):
                    pass
            elif kind in (Kind.E, Kind.L):
                sizes = self._passage(s, j).leaving
                blocks = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes if size]
                away += self._peers.away(blocks) if kind == Kind.E else self._peers.back(blocks)
            if action.sends is not None and action.to is not None and action.to != self._rank.number:
                specs = self._sent_specs(action.op)
                self._mail.send(action.sends, tuple(spec.zeros(self._device) for spec in specs), action.to, specs)
        self._mail.flush()
        for ticket in away:
            ticket.wait()
        for stage in self._stages.values():
            stage.abandon()
        self._mail.abandon()
        self._unfinished = ()

    def _begin(self, step: _Step) -> None:
        """Parameters that the schedule does not bring in are brought in now."""
        for s, host in self._hosts.items():
            if not step.evaluating:
                host.start_step()
            if step.evaluating or s not in step.plan.updated:
                host.synchronize()

    def _end(self, step: _Step) -> None:
        """Stages that the schedule does not update are updated now; all messages have left and all updates are done."""
        for s, host in () if step.evaluating else self._hosts.items():
            if s not in step.plan.updated:
                host.gradients_out()
                host.update()
        self._mail.flush()
        for host in self._hosts.values():
            host.wait_update()

    def _where(self, step: _Step, at: Op | str, error: BaseException) -> str:
        """The op at which the host was, and the one whose copy failed, if one did."""
        where = f"rank {self._rank.number} was at {_named(at) if isinstance(at, Op) else at}"
        if step.awaited is not None:
            kind, s, j = step.awaited
            source = self._layout.before(s, j) if kind == Kind.F else self._layout.after(s, j)
            assert source is not None
            where += f", waiting for the {step.awaited} from rank {self._layout.placement[source]}"
        failed = next(
            (op for op, *_, copies in step.times if any(getattr(copy, "error", None) is error for copy in copies)), None
        )
        return where if failed is None else f"{where}; what failed is {_named(failed)}"

    def _run(self, step: _Step, action: Action) -> None:
        """One op; what it needs is taken before its time starts, what it makes is sent at once, before its time
        ends."""
        kind, s, j, part = action.op
        if kind in (Kind.A, Kind.V):
            self._make_room(step, action.op)
            return
        if kind in OPTIMIZER:
            self._update(step, action.op)
            return
        stage, ends = self._stages[s], self._layout.after(s, j) is None
        received = self._take(step, action.receives) if action.receives else step.batch[j] if kind == Kind.F else ()
        if kind == Kind.F and s in self._hosts:
            self._hosts[s].wait_in()
        if kind in BACKWARD:
            stage.activation(j).wait()  # what it waits for is no part of its time
        made: Tensors = ()
        copies: Sequence[Ticket] = ()
        start = step.mark()
        match kind:
            case Kind.F:
                target, route = step.answers[j] if ends else (), self._layout.microbatch_routes[j]
                if step.evaluating:
                    made = stage.evaluate(received, target, route)
                else:
                    made = stage.forward(j, received, target, (s, j) in step.plan.recomputed, route)
                if ends:
                    step.losses[j] = made[0]
            case Kind.C:
                stage.recompute(j)
            case Kind.B | Kind.BW:
                made = stage.backward(j, received, split=kind == Kind.B)
            case Kind.W:
                stage.weight(j)
            case Kind.O:
                with self._link.turn(action.op):
                    copies = stage.offload(j, part)
            case Kind.D:
                stage.drop(j, part)
            case Kind.R:
                with self._link.turn(action.op):
                    copies = stage.reload(j, part)
            case Kind.E:
                copies = stage.evict(j, self._peers)
            case Kind.L:
                copies = stage.reload(j, 0)
        del received
        if action.sends is not None and action.to is not None:
            self._mail.send(action.sends, made, action.to, self._sent_specs(action.op))
        step.times.append((action.op, start, step.mark(), copies))

    def _take(self, step: _Step, message: Message) -> Tensors:
        step.awaited = message
        received = self._mail.take(message)
        step.awaited = None
        return received

    def _update(self, step: _Step, op: Op) -> None:
        """G, U or P: the stage's optimizer on the host."""
        host, start = self._hosts[op.stage], step.mark()
        with self._link.turn(op):
            copies = {Kind.G: host.gradients_out, Kind.U: host.update, Kind.P: host.parameters_in}[op.kind]()
        step.times.append((op, start, step.mark(), copies))

    def _make_room(self, step: _Step | None, op: Op) -> None:
        """A or V: room for what another rank evicts."""
        start = step.mark() if step else None
        if op.kind == Kind.A:
            blocks = self._rank.passages[op.stage, self._layout.microbatch_routes[op.microbatch]].leaving
            self._peers.accept(
                self._layout.placement[op.stage], (op.stage, op.microbatch), [size for size in blocks if size]
            )
        else:
            self._peers.vacate((op.stage, op.microbatch))
        if step:
            step.times.append((op, start, step.mark(), ()))

    def _held_bytes(self, op: Op) -> int:
        if op.stage in self._stages:
            return self._stages[op.stage].held_bytes(op.microbatch)
        return self._peers.held_bytes((op.stage, op.microbatch))

    def _allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else None

    def _specs(self, message: Message) -> Sequence[Spec]:
        """What a stage here receives: its inputs, or the gradients of those of its outputs that require one."""
        passage = self._passage(message.stage, message.microbatch)
        return passage.inputs if message.kind == Kind.F else passage.answered

    def _sent_specs(self, op: Op) -> Sequence[Spec]:
        passage = self._passage(op.stage, op.microbatch)
        return passage.outputs if op.kind == Kind.F else passage.answers

    def _passage(self, stage: int, microbatch: int) -> Passage:
        return self._stages[stage].passages[self._layout.microbatch_routes[microbatch]]

    def _cut(self, value: Any, what: str) -> list[Tensors]:
        return cut(value, self._layout.microbatches, what)


class _Step:
    """What one step gathers as it goes."""

    def __init__(
        self, plan: Plan, batch: list[Tensors], answers: list[Tensors], evaluating: bool, mark: Callable[[], Any]
    ) -> None:
        self.plan, self.batch, self.answers, self.evaluating, self.mark = plan, batch, answers, evaluating, mark
        self.losses: dict[int, Tensor] = {}
        self.awaited: Message | None = None  # while the host waits for it
        self.times: list[tuple[Op, Any, Any, Sequence[Ticket]]] = []  # op, start, end; of transfers what they issued
        self.held: list[int] = []  # bytes after each op
        self.allocated: list[int | None] = []
        self.peak_bytes = 0
        self.excess: Excess | None = None
        self._held: dict[tuple[int, int], int] = {}
        self._now = 0

    def count(self, op: Op, held: int | None, certified: int) -> None:
        """Notes what the op's stage and micro-batch hold after it; None: no more and no less than before."""
        if held is not None:
            key = op.stage, op.microbatch
            self._now += held - self._held.get(key, 0)
            self._held[key] = held
            self.peak_bytes = max(self.peak_bytes, self._now)
        self.held.append(self._now)
        if self._now > certified and (
            self.excess is None or self._now - certified > self.excess.held_bytes - self.excess.certified_bytes
        ):
            self.excess = Excess(op, self._now, certified)

    def trace(self, clock: Clock, begun: Any) -> Iterator[OpTime]:
        held = zip(self.held, self.plan.certified_bytes, strict=True) if self.held else repeat((0, 0))
        for (op, start, end, copies), counted, allocated in zip(self.times, held, self.allocated, strict=False):
            spans = [(copy.start, copy.end) for copy in copies] or [(start, end)]
            yield OpTime(
                op,
                min(clock.ms(begun, a) for a, _ in spans),
                max(clock.ms(begun, b) for _, b in spans),
                *counted,
                allocated,
            )


def _no_mark() -> None:
    return None


def _named(op: Op) -> str:
    what = f"{op}: {op.kind.name} of stage {op.stage}"
    return what if op.kind in OPTIMIZER else f"{what}, micro-batch {op.microbatch}"


def cut(value: Any, microbatches: int, what: str) -> list[Tensors]:
    """A batch in equal micro-batches along the first dimension; `InputError` where it does not divide."""
    tensors = value if isinstance(value, tuple | list) else (value,)
    if not tensors:
        raise InputError(f"{what} is empty: this rank needs a tensor, or a tuple of tensors, of the whole batch")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"{what} is {type(tensor).__name__}: this rank needs a tensor, or a tuple of tensors, of the "
                "whole batch"
            )
        if tensor.requires_grad:
            raise InputError(f"{what} requires a gradient, and a step computes those of parameters only: detach it")
        if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % microbatches:
            raise InputError(
                f"{what} has shape {list(tensor.shape)}: its first dimension must be a multiple of the "
                f"{microbatches} micro-batches"
            )
    # By `data`, so that one micro-batch that is changed in place is no change of the others.
    return list(
        zip(*([part.data for part in tensor.split(len(tensor) // microbatches)] for tensor in tensors), strict=True)
    )
