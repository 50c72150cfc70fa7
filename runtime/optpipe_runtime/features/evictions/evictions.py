"""`Evictions`: the handlers of E, L, A and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from optpipe.errors import InputError, ScheduleError
from optpipe.model.ops import Kind, Op
from optpipe.model.program import of_kinds
from optpipe.schedule import Schedule
from optpipe_runtime.execute.handler import Done, Feature, Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.features.evictions.peers import EvictionOrder, Peers
from optpipe_runtime.lowering.plan import Plan, StageMicrobatch
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.options import Options
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Tensors


class Evictions(Feature):
    """Making one is collective. `peers` moves the bytes."""

    def __init__(self, rank: Rank, options: Options) -> None:
        self._rank, self._stages = rank, rank.stages
        self.peers = Peers(rank.team, rank.layout, rank.device)
        self.handlers = {
            Kind.E: Handler(self._evict, abandon=self._send_zeros),  # the copy only begins
            Kind.L: Handler(self._load, self._held_here, abandon=self._receive_anyway),
            Kind.A: self._on_peer(self._accept),
            Kind.V: self._on_peer(self._vacate),
        }

    def require(self, schedule: Schedule, layout: Layout) -> None:
        require_peers(schedule, layout)

    @property
    def idle(self) -> bool:
        return self.peers.idle

    def start_plan(self, plan: Plan) -> None:
        if len(set(self._rank.forms)) > len(self._rank.layout.routes) and evicts(plan.schedule):
            raise InputError("the schedule evicts activations: the micro-batches of a step must then have equal shapes")
        self.peers.start_step(eviction_orders(plan))

    def close(self) -> None:
        self.peers.close()

    # On the rank that evicts

    def _evict(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._stages[op.stage].evict(op.microbatch, self.peers))

    def _load(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._stages[op.stage].reload(op.microbatch, 0))

    def _held_here(self, op: Op) -> int:
        return self._stages[op.stage].held_bytes(op.microbatch)

    def _send_zeros(self, op: Op, failed: bool) -> Sequence[Handle]:
        return self.peers.take_out(self._blocks(op))

    def _receive_anyway(self, op: Op, failed: bool) -> Sequence[Handle]:
        return self.peers.bring_back(self._blocks(op))

    def _blocks(self, op: Op) -> list[Tensor]:
        """As many zeros as the peer expects, or sends bytes."""
        return [torch.zeros(size, dtype=torch.uint8, device=self._rank.device) for size in self._sizes(op)]

    # On its peer

    def _on_peer(self, do: Callable[[Op], None]) -> Handler:
        """In a step that fails here it has the same to do, because the other rank sends and receives."""

        def run(step: StepRecord, op: Op, received: Tensors) -> Done:
            do(op)
            return Done()

        def abandon(op: Op, failed: bool) -> Sequence[Handle]:
            do(op)
            return ()

        return Handler(run, lambda op: self.peers.held_bytes((op.stage, op.microbatch)), abandon=abandon)

    def _accept(self, op: Op) -> None:
        self.peers.accept(self._rank.layout.placement[op.stage], (op.stage, op.microbatch), self._sizes(op))

    def _vacate(self, op: Op) -> None:
        self.peers.vacate((op.stage, op.microbatch))

    def _sizes(self, op: Op) -> list[int]:
        """Bytes of each block of an activation that leaves."""
        io = self._rank.io[op.stage, self._rank.forms[op.microbatch]]
        return [size for size in io.block_bytes if size]


def evicts(schedule: Schedule) -> bool:
    return any(of_kinds(program.table, Kind.E).any() for program in schedule.programs)


def require_peers(schedule: Schedule, layout: Layout) -> None:
    """Raises `ScheduleError` if it evicts to another peer than the layout has."""
    scheduled = Layout.from_problem(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if scheduled.peer(d) != layout.peer(d) and of_kinds(program.table, Kind.E).any():
            raise ScheduleError(
                f"the schedule evicts from device {d} to device {scheduled.peer(d)}, in this pipeline the peer of "
                f"rank {d} is {layout.peer(d)}"
            )


@lru_cache(maxsize=1)
def eviction_orders(plan: Plan) -> dict[int, EvictionOrder]:
    """The order of evictions of each rank that evicts to the plan's."""
    evictors = {plan.problem.stages[action.op.stage].device for action in plan.actions if action.op.kind == Kind.A}

    def activations(evictor: int, kind: Kind) -> tuple[StageMicrobatch, ...]:
        ops = plan.schedule.programs[evictor].ops()
        return tuple((op.stage, op.microbatch) for op in ops if op.kind == kind)

    return {d: EvictionOrder(activations(d, Kind.E), activations(d, Kind.L)) for d in evictors}
