"""`HostUpdates`: what a step does with optimizers on the host: the ops G, U and P, and the stages that a schedule does
not update by these."""

from __future__ import annotations

from optpipe.model.ops import Kind, Op
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.reductions import Reductions
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.memory.engines import Handle


class HostUpdates:
    """Those of one rank's stages; none if it has no optimizers on the host."""

    def __init__(self, rank: Rank, reductions: Reductions) -> None:
        self._optimizers, self._replicas, self._link = rank.host_optimizers, rank.replicas, rank.link
        self._reductions = reductions

    def begin(self, step: StepRecord) -> None:
        """Brings in the parameters that the schedule does not bring in."""
        for s, optimizer in self._optimizers.items():
            if not step.evaluating:
                optimizer.start_step()
            if step.evaluating or s not in step.plan.updated:
                optimizer.synchronize()

    def end(self, step: StepRecord) -> None:
        """Updates the stages that the schedule does not update, and waits until all updates are done. It does not wait
        until messages have left: gloo sends one only when its receiver asks for it, which may be far behind."""
        if step.evaluating or not self._optimizers:
            return
        self._reductions.finish()
        self.let_leave(step)
        for s, optimizer in self._optimizers.items():
            if s not in step.plan.updated:
                optimizer.gradients_out()
                optimizer.update()
        for optimizer in self._optimizers.values():
            optimizer.wait_update()

    def run(self, step: StepRecord, op: Op) -> None:
        """Runs G, U or P. While the stage's gradients are being reduced over the replicas, its G and U are put off, and
        G passes the shared link on."""
        optimizer, start = self._optimizers[op.stage], step.mark()
        copies: list[Handle] = []
        run = {Kind.G: optimizer.gradients_out, Kind.U: optimizer.update, Kind.P: optimizer.parameters_in}[op.kind]
        with self._link.in_order(op):
            if op.kind != Kind.P and (op.stage in step.put_off or not self._reductions.ended(op.stage)):
                step.put_off.setdefault(op.stage, []).append((run, copies))
            else:
                copies += run()
        step.times.append((op, start, step.mark(), None, copies))

    def let_leave(self, step: StepRecord) -> None:
        """Runs the G and U that were put off, of stages whose reductions have ended. Waits for none: replicas that run
        other schedules could wait for each other for ever."""
        for s in [s for s in step.put_off if self._reductions.ended(s)]:
            for run, copies in step.put_off.pop(s):
                copies += run()

    def gather(self, s: int) -> None:
        """Begins to gather a stage, once its shards are those after the last update."""
        if s in self._optimizers and self._replicas.ranks(s):
            self._optimizers[s].parameters_in()
            self._optimizers[s].wait_in()
        self._replicas.gather(s)

    def wait_in(self, s: int) -> None:
        """Waits until the stage's parameters are those after its last update."""
        if s in self._optimizers:
            self._optimizers[s].wait_in()
