"""The handlers of a stage's compute ops: F, C, B, BW and W."""

from __future__ import annotations

from collections.abc import Mapping

from optpipe.model.ops import Kind, Op
from optpipe_runtime.execute.handler import Done, Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.stage.io import Tensors


class StageHandler(Handler):
    """An op on what a stage here keeps of a micro-batch."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stages = rank, rank.stages

    def held_bytes(self, op: Op) -> int | None:
        return self._stages[op.stage].held_bytes(op.microbatch)


class _Forward(StageHandler):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        _, s, j, _ = op
        layout, stage, activation = self._rank.layout, self._stages[s], (s, j)
        ends, route = layout.after(s, j) is None, layout.microbatch_routes[j]
        target = step.targets[j] if ends else ()
        kwargs = step.kwargs[s][j] if step.kwargs else {}
        if step.evaluating:
            made = stage.evaluate(j, received, target, route, kwargs)
        else:
            plan = step.plan
            leaving = activation in plan.leaving
            made = stage.forward(
                j,
                received,
                target,
                recompute=activation in plan.recomputed,
                route=route,
                backward=Kind.B if activation in plan.split else None if leaving else Kind.BW,
                captured=step.counting or leaving,
                kwargs=kwargs,
            )
        if ends:
            step.losses[j] = made[0]
        return Done(made)


class _Recompute(StageHandler):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].recompute(op.microbatch)
        return Done()


class _Backward(StageHandler):
    def wait(self, step: StepRecord, op: Op) -> None:
        """For the reloads."""
        self._stages[op.stage].activation(op.microbatch).wait()

    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(self._stages[op.stage].backward(op.microbatch, received, split=op.kind == Kind.B))


class _Weight(StageHandler):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].weight(op.microbatch)
        return Done()


def compute_handlers(rank: Rank) -> Mapping[Kind, Handler]:
    backward = _Backward(rank)
    return {
        Kind.F: _Forward(rank),
        Kind.C: _Recompute(rank),
        Kind.B: backward,
        Kind.BW: backward,
        Kind.W: _Weight(rank),
    }
