"""`Executor`: runs one step of this rank, op by op in program order. What an op does is its handler's (`execute.rank`):
`StageOps` has those of compute and of offloads to the host, features have the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from optpipe.model.ops import OPTIMIZER, Kind, Op
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.gradients import NO_WINDOWS
from optpipe_runtime.execute.rank import Done, Handler, Rank
from optpipe_runtime.execute.report import OpRecord, StepRecord, StepReport
from optpipe_runtime.lowering.plan import Action, Plan
from optpipe_runtime.memory.engines import Clock, Handle
from optpipe_runtime.stage.forwards import Arguments
from optpipe_runtime.stage.io import Spec, StageIO, Tensors, tensors_in

log = logging.getLogger("optpipe.runtime")

NOTHING = Done()


class Executor:
    """Runs plans on this rank. When the shapes of micro-batches have changed, call `bytes.forget`."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stages, self._messages = rank, rank.stages, rank.messages
        self._clock = Clock(rank.device)
        self.bytes = ByteCounts(rank)
        self._handlers: dict[Kind, Handler] = StageOps(rank).handlers
        for feature in rank.features:
            self._handlers |= feature.handlers
        self._unfinished: Sequence[Action] = ()  # of a step that failed here, or is left out
        self._failed: Op | None = None

    def run(
        self, plan: Plan, batch: Batch, evaluating: bool = False, will_count: Callable[[], bool] = lambda: False
    ) -> StepReport:
        """Runs one step: computes losses, and adds the gradients of the mean loss to the parameters' `.grad`.

        The batch's inputs are needed where a route begins, its targets where one ends. With `evaluating` only losses
        are computed. `will_count` is called when a backward has begun: whether it is certain that the step is not
        undone, so that gradients may be reduced over the replicas beside it.
        """
        step = StepRecord(
            plan,
            self._rank.cut(batch, self._rank.layout.microbatches),
            evaluating=evaluating,
            tracing=batch.trace,
            counting=self.bytes.are_wanted(plan, batch, evaluating),
            mark=self._clock.mark if batch.trace or batch.timed else lambda: None,
            will_count=will_count,
            windows=NO_WINDOWS if evaluating else self._rank.reductions.windows(plan),
        )
        self._prepare(plan, evaluating)
        if self._rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._rank.device)
        for stage in self._stages.values():
            stage.forwards.results = step.results if batch.outputs else None
        if not evaluating:
            self._rank.means.start_step(plan)
        begun = self._clock.mark()
        at: Op | str = "the beginning of the step"
        actions, done = plan.forwards if evaluating else plan.actions, 0
        try:
            for feature in self._rank.features:
                feature.start(plan, evaluating)
            for action, certified in zip(actions, plan.certified_bytes, strict=False):
                at = action.op
                self._begin(action)
                self._run(step, action)
                self.bytes.count(step, action.op, self._handlers[action.op.kind], certified)
                done += 1
                self._end(step, action.op)
            at = "the end of the step"
            for feature in self._rank.features:
                feature.end(plan, evaluating)
        except BaseException as error:
            error.add_note(self._where(step, at, error))
            self._unfinished = actions[done:]
            self._failed = self._unfinished[0].op if self._unfinished else None
            raise
        ended = self._clock.mark()
        self._clock.settle()
        assert self._messages.idle, "a step leaves nothing behind"
        for stage in self._stages.values():
            assert stage.idle, "a step leaves nothing behind"
            stage.end_step()
        report = step.report(self._clock, begun, ended, self.bytes.end(step))
        return report if batch.weights is None else replace(report, weights=tuple(batch.weights))

    def skip(self, plan: Plan) -> None:
        """Instead of `run`: lets the other ranks run theirs, of which nothing will count."""
        self._prepare(plan, evaluating=False)
        for feature in self._rank.features:
            feature.start(plan, evaluating=False)
        self._unfinished, self._failed = plan.actions, None
        self.abandon()

    def abandon(self) -> None:
        """After a step that failed here: lets the other ranks finish theirs, and drops what is left of it. From the
        failed op on, what the others wait for is sent as zeros, and what they send is received; gathers are begun, for
        other replicas. Not for a step that updates parameters on the host."""
        transfers: list[Handle] = []
        for action in self._unfinished:
            self._begin(action)
            if action.receives is not None:
                self._messages.discard(action.receives)
            transfers += self._handlers[action.op.kind].abandon(action.op, action.op == self._failed)
            if action.sends is not None and action.to is not None and action.to != self._rank.number:
                specs = self._sent_specs(action.op)
                zeros = tuple(spec.zeros(self._rank.device) for spec in specs)
                self._messages.send(action.sends, zeros, action.to, specs)
        self._messages.flush()
        for transfer in transfers:
            transfer.wait()
        for stage in self._stages.values():
            stage.abandon()
        self._messages.abandon()
        self._unfinished = ()

    def _prepare(self, plan: Plan, evaluating: bool) -> None:
        self._messages.start_step()
        self._rank.pool.start_step()
        if not evaluating:
            self._rank.link.start_step(plan.link_orders)

    def _begin(self, action: Action) -> None:
        """What other ranks need to go on, before the op."""
        for message, source in action.post:
            io = self._io(message.stage, message.microbatch)
            self._messages.post(message, source, io.inputs if message.kind == Kind.F else io.output_gradients)
        for s in action.gathers:
            if s in self._rank.freshen and self._rank.replicas.sharded[s].ranks:
                self._rank.freshen[s]()  # the shards, before they are gathered
            self._rank.replicas.gather(s)

    def _run(self, step: StepRecord, action: Action) -> None:
        """Runs one op. It takes what it needs before its time starts, and sends its result before its time ends."""
        op, handler = action.op, self._handlers[action.op.kind]
        if op in step.windows.room:
            self._rank.reductions.let_go(step.windows.room[op])
        if op.kind == Kind.F and op.stage not in step.begun:
            self._begin_stage(step, op.stage)
        received: Tensors = step.batch.inputs[op.microbatch] if op.kind == Kind.F and action.receives is None else ()
        if action.receives is not None:
            step.awaited = action.receives
            received = self._messages.take(action.receives)
            step.awaited = None
        if op.kind == Kind.F and op.stage in self._rank.freshen:
            self._rank.freshen[op.stage]()
        handler.wait(op)
        if action.to is not None:
            self._messages.make_room(action.to)
        start = step.mark()
        outputs, copies = handler.run(step, op, received) or NOTHING
        del received
        if action.sends is not None and action.to is not None:
            self._messages.send(action.sends, outputs, action.to, self._sent_specs(op))
        step.ops.append(OpRecord(op, start, step.mark(), copies))

    def _end(self, step: StepRecord, op: Op) -> None:
        """What may go on once the op was issued: the mean and the reduction of gradients, and what waits for one. No
        stage begins its backwards before all ranks have begun the step, so `will_count` waits for no vote here."""
        means, reductions = self._rank.means, self._rank.reductions
        if op in step.plan.completing:
            means.complete(op.stage)
            if self._rank.replicas.reduced and step.will_count():
                reductions.complete(op.stage)
        elif op in step.windows.ends and step.will_count():
            means.end_window(op.stage)
            reductions.end_window(op.stage)
        elif op in step.windows.ends:
            self._rank.replicas.forget()
        elif step.evaluating and op in step.plan.closing:
            self._rank.replicas.sharded[op.stage].shard()
        reductions.resume()

    def _begin_stage(self, step: StepRecord, s: int) -> None:
        """Before a stage's first F: waits until its parameters are whole, and names the tensors that are no
        activations."""
        step.begun.add(s)
        self._rank.replicas.wait(s)
        layout = self._rank.layout
        inputs = step.batch.inputs if s in layout.first else []
        targets = step.batch.targets if s in layout.last else []
        kwargs = step.batch.kwargs.get(s, [])
        parts = step.plan.problem.stages[s].offload_parts
        self._stages[s].start_step(tensors_in((inputs, targets, kwargs)), parts)

    def _where(self, step: StepRecord, at: Op | str, error: BaseException) -> str:
        """Says at which op the host was, and which op's copy failed, if one did."""
        layout = self._rank.layout
        where = f"rank {self._rank.team.name} was at {_name(at) if isinstance(at, Op) else at}"
        if step.awaited is not None:
            kind, s, j = step.awaited
            source = layout.before(s, j) if kind == Kind.F else layout.after(s, j)
            assert source is not None
            where += f", waiting for the {step.awaited} from rank {layout.placement[source]}"
        for record in step.ops:
            if any(getattr(copy, "error", None) is error for copy in record.copies):
                return f"{where}; what failed is {_name(record.op)}"
        return where

    def _sent_specs(self, op: Op) -> Sequence[Spec]:
        io = self._io(op.stage, op.microbatch)
        return io.outputs if op.kind == Kind.F else io.input_gradients

    def _io(self, stage: int, microbatch: int) -> StageIO:
        return self._stages[stage].io[self._rank.forms[microbatch]]


def _name(op: Op) -> str:
    what = f"{op}: {op.kind.name} of stage {op.stage}"
    return what if op.kind in OPTIMIZER else f"{what}, micro-batch {op.microbatch}"


class StageOps:
    """The handlers of one rank's stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stages = rank, rank.stages
        backward = Handler(self._backward, rank.held_bytes, wait=self._wait_for_reloads)
        self.handlers = {
            Kind.F: Handler(self._forward, rank.held_bytes),
            Kind.C: Handler(self._recompute, rank.held_bytes, wait=self._wait_for_reloads),
            Kind.B: backward,
            Kind.BW: backward,
            Kind.W: Handler(self._weight, rank.held_bytes),
            Kind.O: Handler(self._offload, abandon=self._pass_link_on),  # the copy only begins
            Kind.D: Handler(self._drop, rank.held_bytes),
            Kind.R: Handler(self._reload, rank.held_bytes, abandon=self._pass_link_on),
        }

    def _forward(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        s, j, plan = op.stage, op.microbatch, step.plan
        stage, activation, form = self._stages[s], (s, j), self._rank.forms[j]
        ends = self._rank.layout.after(s, j) is None
        target, kwargs = step.batch.targets[j] if ends else (), step.batch.named(s, j)
        if step.evaluating:
            outputs = stage.forwards.evaluate(stage.io[form], j, Arguments(received, target, kwargs))
        else:
            leaving = activation in plan.leaving
            outputs = stage.forward(
                j,
                received,
                target,
                recompute=self._rank.levels[plan.recomputed[activation]] if activation in plan.recomputed else None,
                form=form,
                backward=Kind.B if activation in plan.split else None if leaving else Kind.BW,
                captured=step.counting or leaving,
                kwargs=kwargs,
            )
        if ends:
            step.losses[j] = outputs[0]
        return Done(outputs)

    def _recompute(self, step: StepRecord, op: Op, received: Tensors) -> None:
        self._stages[op.stage].recompute(op.microbatch)

    def _wait_for_reloads(self, op: Op) -> None:
        self._stages[op.stage].activation(op.microbatch).wait()

    def _backward(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(self._stages[op.stage].backward(op.microbatch, received, split=op.kind == Kind.B))

    def _weight(self, step: StepRecord, op: Op, received: Tensors) -> None:
        self._stages[op.stage].weight(op.microbatch)

    def _offload(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].offload(op.microbatch, op.part))

    def _drop(self, step: StepRecord, op: Op, received: Tensors) -> None:
        self._stages[op.stage].drop(op.microbatch, op.part)

    def _reload(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].reload(op.microbatch, op.part))

    def _pass_link_on(self, op: Op, failed: bool) -> Sequence[Handle]:
        """To the rank whose transfer is next. An op that failed has done so."""
        if not failed:
            with self._rank.link.in_order(op):
                pass
        return ()


class ByteCounts:
    """What a rank holds after each op, by live storages, beside what the certificates allow."""

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
        """The sizes of what passes between the stages have changed. If stages were `learned` anew for them, the bytes
        of the next training step are counted."""
        if learned:
            self._counted = None
        self._certified.clear()

    def count(self, step: StepRecord, op: Op, handler: Handler, certified: int) -> None:
        """After an op, in a step that is counted or traced."""
        if step.counting or (step.tracing and step.evaluating):
            step.gathered_bytes = max(step.gathered_bytes or 0, self._rank.replicas.held_bytes())
        if step.counting:
            step.count(op, None if handler.held_bytes is None else handler.held_bytes(op), certified)
        if step.tracing and self._rank.device.type == "cuda":
            # `torch.cuda.memory_allocated` first makes a flat table of all statistics, which takes as long as an op.
            statistics = torch.cuda.memory_stats_as_nested_dict(self._rank.device)
            step.allocated.append(int(statistics["allocated_bytes"]["all"]["current"]))

    def end(self, step: StepRecord) -> dict[str, int | None]:
        """The peaks for the report, and what the plan allows. Logs once for each plan that more was held."""
        rank, plan, evaluating = self._rank, step.plan, step.evaluating
        if step.counting:
            self._counted = plan
        if step.excess is not None and plan.digest not in self._logged:
            self._logged.add(plan.digest)
            op, held, certified = step.excess
            log.warning("rank %s holds %d bytes after %s, %d are certified", rank.team.name, held, op, certified)
        sharded, reduced = rank.replicas.sharded, step.windows.room
        key = plan.digest, evaluating, bool(reduced)
        if step.counting or key not in self._certified:  # how large gathered parameters are, a counted step finds
            self._certified[key] = (
                plan.message_peak(rank.message_bytes, evaluating),
                plan.gathered_peak(
                    lambda s: sharded[s].parameter_bytes, lambda s: sharded[s].gradient_bytes, evaluating, reduced
                ),
            )
        messages, gathered = self._certified[key]
        return {
            "host_peak_bytes": rank.pool.peak_bytes,
            "buffer_peak_bytes": rank.messages.peak_bytes,
            "buffer_certified_bytes": messages,
            "gathered_certified_bytes": gathered,
            "cuda_peak_bytes": torch.cuda.max_memory_allocated(rank.device) if rank.device.type == "cuda" else None,
        }
