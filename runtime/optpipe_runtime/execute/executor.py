"""`Executor`: runs one training step of this rank, op by op in program order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from optpipe.errors import OptPipeError
from optpipe.model.ops import BACKWARD, OPTIMIZER, Kind, Op
from optpipe_runtime.clock import Clock
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.host_updates import HostUpdates
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.reductions import Reductions
from optpipe_runtime.execute.report import StepRecord, StepReport
from optpipe_runtime.lowering.plan import Action, Message, Plan
from optpipe_runtime.lowering.windows import Windows, windows
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Spec, StageIO, Tensors, tensors_in
from optpipe_runtime.stage.runner import StageRunner

log = logging.getLogger("optpipe.runtime")

# After these ops the device holds what it held before: copies begin, or they move model state.
HOLDING_SAME = OPTIMIZER | {Kind.O, Kind.E}
NO_WINDOWS = Windows(frozenset(), {})


class Executor:
    """Runs plans on what this rank has."""

    def __init__(self, rank: Rank, reductions: Reductions) -> None:
        self._rank, self._stages, self._device = rank, rank.stages, rank.device
        self._messages, self._pool, self._peers, self._link = rank.messages, rank.pool, rank.peers, rank.link
        self._clock = Clock(rank.device, rank.team.require_alive)
        self._host_updates, self._reductions = HostUpdates(rank, reductions), reductions
        self._unfinished: Sequence[Action] = ()  # of a step that failed here
        self._logged: set[str] = set()  # digests of the plans whose excess is in the log
        self._counted: Plan | None = None  # the last one whose bytes were counted
        self._peaks: dict[tuple[str, bool, bool], tuple[int, int]] = {}  # of messages and of gathered parameters
        self._windows = "", NO_WINDOWS  # with the digest of their plan

    @property
    def _layout(self) -> Layout:
        return self._rank.layout

    @property
    def idle(self) -> bool:
        """Whether nothing of a step is left. Only then another plan may run."""
        return self._messages.idle and self._peers.idle and all(stage.idle for stage in self._stages.values())

    def run(
        self,
        plan: Plan,
        batch: Batch,
        evaluating: bool = False,
        completed: Callable[[int], object] = lambda _: None,
        window_ended: Callable[[int], object] = lambda _: None,
    ) -> StepReport:
        """Runs one step: computes losses, and adds the gradients of the mean loss to the parameters' `.grad`.

        The batch's inputs are needed where a route begins, its targets where one ends. With `evaluating` only losses
        are computed. `completed` is called with a stage after the op by which its gradients are complete, and in a step
        that is in windows `window_ended` after the last op of an earlier window. Bytes are counted in a traced step,
        and in the first by a plan.
        """
        m, replicas = self._layout.microbatches, self._rank.replicas
        given = batch.cut_inputs(m) if self._rank.takes_inputs else []
        asked = batch.cut_targets(m) if self._rank.takes_targets else []
        named = {s: batch.cut_kwargs(s, m) for s in self._stages} if batch.kwargs else {}
        self._start(plan, evaluating)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

        counting = not evaluating and (batch.trace or plan is not self._counted)
        step = StepRecord(
            plan, given, asked, named, evaluating, self._clock.mark if batch.trace else _no_mark, counting
        )
        for stage in self._stages.values():
            stage.results = step.results if batch.outputs else None
        begun = self._clock.mark()
        at: Op | str = "the beginning of the step"
        actions, done = plan.forwards if evaluating else plan.actions, 0
        window_ends, room = NO_WINDOWS if evaluating else self._windows_of(plan)
        try:
            self._host_updates.begin(step)
            for action, certified in zip(actions, plan.certified_bytes, strict=False):
                at = action.op
                for message, source in action.post:
                    self._messages.post(message, source, self._specs(message))
                for s in action.gathers:
                    self._host_updates.gather(s)
                if action.op in room:
                    self._reductions.make_room(room[action.op])
                self._run(step, action)
                if counting or (batch.trace and evaluating):
                    step.gathered_bytes = max(step.gathered_bytes or 0, replicas.held_bytes())
                if counting:
                    step.count(
                        action.op, None if action.op.kind in HOLDING_SAME else self._held_bytes(action.op), certified
                    )
                if batch.trace:
                    step.allocated.append(self._allocated_bytes())
                done += 1
                if action.op in plan.completing:
                    completed(action.op.stage)
                elif action.op in window_ends:
                    window_ended(action.op.stage)
                elif evaluating and action.op in plan.closing:
                    replicas.shard(action.op.stage)
                self._host_updates.let_leave(step)
            at = "the end of the step"
            self._host_updates.end(step)
        except BaseException as error:
            error.add_note(self._where(step, at, error))
            self._unfinished = actions[done:]
            raise
        ended = self._clock.mark()
        self._clock.settle()
        assert self.idle, "a step leaves nothing behind"
        for stage in self._stages.values():
            stage.end_step()
        if counting:
            self._counted = plan
        certified_messages, certified_gathered = self._certified(plan, evaluating, counting)
        if step.excess is not None and plan.digest not in self._logged:
            self._logged.add(plan.digest)
            op, held, certified = step.excess
            log.warning("rank %s holds %d bytes after %s, %d are certified", self._rank.team.name, held, op, certified)
        return StepReport(
            losses=[float(step.losses[j]) for j in sorted(step.losses)] if step.losses else None,
            step_ms=self._clock.ms(begun, ended),
            peak_activation_bytes=step.peak_bytes if counting or evaluating else None,
            host_peak_bytes=self._pool.peak_bytes,
            buffer_peak_bytes=self._messages.peak_bytes,
            buffer_certified_bytes=certified_messages,
            gathered_peak_bytes=step.gathered_bytes,
            gathered_certified_bytes=certified_gathered,
            cuda_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
            excess=step.excess,
            trace=tuple(step.trace(self._clock, begun)) if batch.trace else (),
            outputs=[step.results[j] for j in sorted(step.results)] if step.results else None,
        )

    def skip(self, plan: Plan) -> None:
        """Instead of `run`: lets the other ranks run theirs, of which nothing will count."""
        self._start(plan, evaluating=False)
        self._unfinished = plan.actions
        self.abandon()

    def forget_sizes(self) -> None:
        """After the stages were learned again: counts the bytes of the next step, whatever runs."""
        self._counted = None
        self._peaks.clear()

    def abandon(self) -> None:
        """After a step that failed here: lets the other ranks finish theirs, and drops what is left of it.

        From the failed op on, what the others wait for is sent as zeros, and what they send is received; gathers are
        begun, for other replicas. Do not call it for a step that updates parameters on the host.
        """
        transfers: list[Handle] = []
        for k, action in enumerate(self._unfinished):
            kind, s, j, _ = action.op
            for message, source in action.post:
                self._messages.post(message, source, self._specs(message))
            for gathered in action.gathers:
                self._host_updates.gather(gathered)
            if action.receives is not None:
                self._messages.discard(action.receives)
            if kind in (Kind.A, Kind.V):
                self._make_room(None, action.op)
            elif kind in (Kind.O, Kind.R) and k:  # the op that failed has passed its token on
                with self._link.in_order(action.op):
                    pass
            elif kind in (Kind.E, Kind.L):
                sizes = self._io(s, j).block_bytes
                blocks = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes if size]
                transfers += self._peers.take_out(blocks) if kind == Kind.E else self._peers.bring_back(blocks)
            if action.sends is not None and action.to is not None and action.to != self._rank.number:
                specs = self._sent_specs(action.op)
                self._messages.send(action.sends, tuple(spec.zeros(self._device) for spec in specs), action.to, specs)
        self._messages.flush()
        for transfer in transfers:
            transfer.wait()
        for stage in self._stages.values():
            stage.abandon()
        self._messages.abandon()
        self._unfinished = ()

    def _start(self, plan: Plan, evaluating: bool) -> None:
        if not self.idle:
            raise OptPipeError("the step before failed and left its messages behind: make a new Pipeline")
        self._messages.start_step()
        self._pool.start_step()
        if not evaluating:
            self._peers.start_step(plan.evictions)
            self._link.start_step(plan.link_orders)

    def _certified(self, plan: Plan, evaluating: bool, counted: bool) -> tuple[int, int]:
        """The bytes that the plan allows for messages, and for gathered parameters with their gradients. How large
        these are, a counted step finds."""
        key = plan.digest, evaluating, self._reductions.in_windows
        if counted or key not in self._peaks:
            replicas, (_, room) = self._rank.replicas, self._windows_of(plan)
            self._peaks[key] = (
                plan.message_peak(self._rank.message_bytes, evaluating),
                plan.gathered_peak(replicas.parameter_bytes, replicas.gradient_bytes, evaluating, room),
            )
        return self._peaks[key]

    def _windows_of(self, plan: Plan) -> Windows:
        """In which a step by this plan reduces gradients; none if this step does not."""
        if not self._reductions.in_windows or self._rank.whole_gradients is None:
            return NO_WINDOWS
        if self._windows[0] != plan.digest:
            ops = [action.op for action in plan.actions]
            self._windows = plan.digest, windows(ops, self._rank.whole_gradients)
        return self._windows[1]

    def _where(self, step: StepRecord, at: Op | str, error: BaseException) -> str:
        """Says at which op the host was, and which op's copy failed, if one did."""
        where = f"rank {self._rank.team.name} was at {_named(at) if isinstance(at, Op) else at}"
        if step.awaited is not None:
            kind, s, j = step.awaited
            source = self._layout.before(s, j) if kind == Kind.F else self._layout.after(s, j)
            assert source is not None
            where += f", waiting for the {step.awaited} from rank {self._layout.placement[source]}"
        failed = next(
            (op for op, *_, copies in step.times if any(getattr(copy, "error", None) is error for copy in copies)), None
        )
        return where if failed is None else f"{where}; what failed is {_named(failed)}"

    def _run(self, step: StepRecord, action: Action) -> None:
        """Runs one op. It takes what it needs before its time starts, and sends its result before its time ends."""
        kind, s, j, part = action.op
        if kind in (Kind.A, Kind.V):
            self._make_room(step, action.op)
            return
        if kind in OPTIMIZER:
            self._host_updates.run(step, action.op)
            return
        stage, ends = self._stages[s], self._layout.after(s, j) is None
        if kind == Kind.F and s not in step.begun:
            self._begin_stage(step, stage)
        wait = None
        if action.receives:
            asked = step.mark()
            received = self._take(step, action.receives)
            wait = asked, step.mark()
        else:
            received = step.inputs[j] if kind == Kind.F else ()
        if kind == Kind.F:
            self._host_updates.wait_in(s)
        if kind in BACKWARD:
            stage.activation(j).wait()  # before the time of the op starts
        if action.to is not None:
            self._messages.make_room(action.to)
        made: Tensors = ()
        copies: Sequence[Handle] = ()
        start = step.mark()
        match kind:
            case Kind.F:
                target, route = step.targets[j] if ends else (), self._layout.microbatch_routes[j]
                kwargs = step.kwargs[s][j] if step.kwargs else {}
                if step.evaluating:
                    made = stage.evaluate(j, received, target, route, kwargs)
                else:
                    plan, activation = step.plan, (s, j)
                    split, leaving = activation in plan.split, activation in plan.leaving
                    made = stage.forward(
                        j,
                        received,
                        target,
                        recompute=activation in plan.recomputed,
                        route=route,
                        backward=Kind.B if split else None if leaving else Kind.BW,
                        captured=step.counting or leaving,
                        kwargs=kwargs,
                    )
                if ends:
                    step.losses[j] = made[0]
            case Kind.C:
                stage.recompute(j)
            case Kind.B | Kind.BW:
                made = stage.backward(j, received, split=kind == Kind.B)
            case Kind.W:
                stage.weight(j)
            case Kind.O:
                with self._link.in_order(action.op):
                    copies = stage.offload(j, part)
            case Kind.D:
                stage.drop(j, part)
            case Kind.R:
                with self._link.in_order(action.op):
                    copies = stage.reload(j, part)
            case Kind.E:
                copies = stage.evict(j, self._peers)
            case Kind.L:
                copies = stage.reload(j, 0)
        del received
        if action.sends is not None and action.to is not None:
            self._messages.send(action.sends, made, action.to, self._sent_specs(action.op))
        step.times.append((action.op, start, step.mark(), wait, copies))

    def _begin_stage(self, step: StepRecord, stage: StageRunner) -> None:
        """Before the first F of a stage: waits until its parameters are whole. These and the batch are no
        activations."""
        s = stage.index
        step.begun.add(s)
        self._rank.replicas.wait(s)
        given, asked = (
            step.inputs[0] if s in self._layout.first else (),
            step.targets[0] if s in self._layout.last else (),
        )
        named = step.kwargs[s][0] if step.kwargs else {}
        stage.start_step(tensors_in((given, asked, named)), step.plan.problem.stages[s].offload_parts)

    def _take(self, step: StepRecord, message: Message) -> Tensors:
        step.awaited = message
        received = self._messages.take(message)
        step.awaited = None
        return received

    def _make_room(self, step: StepRecord | None, op: Op) -> None:
        """A or V: makes or frees room for what another rank evicts."""
        start = step.mark() if step else None
        if op.kind == Kind.A:
            blocks = self._rank.io[op.stage, self._layout.microbatch_routes[op.microbatch]].block_bytes
            self._peers.accept(
                self._layout.placement[op.stage], (op.stage, op.microbatch), [size for size in blocks if size]
            )
        else:
            self._peers.vacate((op.stage, op.microbatch))
        if step:
            step.times.append((op, start, step.mark(), None, ()))

    def _held_bytes(self, op: Op) -> int:
        if op.stage in self._stages:
            return self._stages[op.stage].held_bytes(op.microbatch)
        return self._peers.held_bytes((op.stage, op.microbatch))

    def _allocated_bytes(self) -> int | None:
        """What `torch.cuda.memory_allocated` tells. That first makes a flat table of all statistics, which takes the
        host as long as an op."""
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def _specs(self, message: Message) -> Sequence[Spec]:
        """The tensors of a message to a stage here."""
        io = self._io(message.stage, message.microbatch)
        return io.inputs if message.kind == Kind.F else io.output_gradients

    def _sent_specs(self, op: Op) -> Sequence[Spec]:
        io = self._io(op.stage, op.microbatch)
        return io.outputs if op.kind == Kind.F else io.input_gradients

    def _io(self, stage: int, microbatch: int) -> StageIO:
        return self._stages[stage].io[self._layout.microbatch_routes[microbatch]]


def _no_mark() -> None:
    return None


def _named(op: Op) -> str:
    what = f"{op}: {op.kind.name} of stage {op.stage}"
    return what if op.kind in OPTIMIZER else f"{what}, micro-batch {op.microbatch}"
