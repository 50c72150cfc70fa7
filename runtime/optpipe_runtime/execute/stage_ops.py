"""`StageOps`: the handlers of ops that need no feature: compute, and offloads to the host."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.model.ops import Kind, Op
from optpipe_runtime.execute.handler import Done, Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.stage.io import Tensors

NOTHING = Done()


class StageOps:
    """Those of one rank's stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stages = rank, rank.stages
        backward = Handler(self._backward, self.held_bytes, wait=self._wait_for_reloads)
        self.handlers = {
            Kind.F: Handler(self._forward, self.held_bytes),
            Kind.C: Handler(self._recompute, self.held_bytes, wait=self._wait_for_reloads),
            Kind.B: backward,
            Kind.BW: backward,
            Kind.W: Handler(self._weight, self.held_bytes),
            Kind.O: Handler(self._offload, abandon=self._pass_link_on),  # the copy only begins
            Kind.D: Handler(self._drop, self.held_bytes),
            Kind.R: Handler(self._reload, self.held_bytes, abandon=self._pass_link_on),
        }

    def held_bytes(self, op: Op) -> int:
        return self._stages[op.stage].held_bytes(op.microbatch)

    def _forward(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        _, s, j, _ = op
        layout, stage, activation = self._rank.layout, self._stages[s], (s, j)
        ends, form = layout.after(s, j) is None, self._rank.forms[j]
        target = step.batch.targets[j] if ends else ()
        kwargs = step.batch.named(s, j)
        if step.evaluating:
            outputs = stage.evaluate(j, received, target, form, kwargs)
        else:
            plan = step.plan
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

    def _recompute(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].recompute(op.microbatch)
        return NOTHING

    def _wait_for_reloads(self, op: Op) -> None:
        self._stages[op.stage].activation(op.microbatch).wait()

    def _backward(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(self._stages[op.stage].backward(op.microbatch, received, split=op.kind == Kind.B))

    def _weight(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].weight(op.microbatch)
        return NOTHING

    def _offload(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].offload(op.microbatch, op.part))

    def _drop(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].drop(op.microbatch, op.part)
        return NOTHING

    def _reload(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].reload(op.microbatch, op.part))

    def _pass_link_on(self, op: Op, failed: bool) -> Sequence[Handle]:
        """To the rank whose transfer is next. An op that failed has done so."""
        if not failed:
            with self._rank.link.in_order(op):
                pass
        return ()
