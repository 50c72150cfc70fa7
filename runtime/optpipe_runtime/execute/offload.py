"""The handlers of offloads to the host: O, D and R."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optpipe.model.ops import Kind, Op
from optpipe_runtime.execute.compute import StageHandler
from optpipe_runtime.execute.handler import Done, Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.stage.io import Tensors


class _Transfer(StageHandler):
    """An op on the host link, in the schedule's order if ranks share the link."""

    def abandon(self, op: Op, failed: bool) -> Sequence[Handle]:
        """Passes the link on. An op that failed has done so."""
        if not failed:
            with self._rank.link.in_order(op):
                pass
        return ()


class _Offload(_Transfer):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].offload(op.microbatch, op.part))

    def held_bytes(self, op: Op) -> int | None:
        """The copy only begins."""
        return None


class _Drop(StageHandler):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._stages[op.stage].drop(op.microbatch, op.part)
        return Done()


class _Reload(_Transfer):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        with self._rank.link.in_order(op):
            return Done(copies=self._stages[op.stage].reload(op.microbatch, op.part))


def offload_handlers(rank: Rank) -> Mapping[Kind, Handler]:
    return {Kind.O: _Offload(rank), Kind.D: _Drop(rank), Kind.R: _Reload(rank)}
