"""`Evictions`: the handlers of E, L, A and V."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optpipe.errors import ScheduleError
from optpipe.model.ops import Kind, Op
from optpipe.model.program import of_kinds
from optpipe.schedule import Schedule
from optpipe_runtime.execute.compute import StageHandler
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
        self.peers = Peers(rank.team, rank.layout, rank.device)
        self.handlers = {
            Kind.E: _Evict(rank, self.peers),
            Kind.L: _Load(rank, self.peers),
            Kind.A: _Accept(rank, self.peers),
            Kind.V: _Vacate(rank, self.peers),
        }
        self._orders: dict[int, EvictionOrder] = {}
        self._orders_of = ""  # the digest of their plan

    def require(self, schedule: Schedule, layout: Layout) -> None:
        """Ranks may evict only to the peers that this pipeline has."""
        require_peers(schedule, layout)

    @property
    def idle(self) -> bool:
        return self.peers.idle

    def start_plan(self, plan: Plan) -> None:
        if self._orders_of != plan.digest:
            self._orders, self._orders_of = eviction_orders(plan), plan.digest
        self.peers.start_step(self._orders)

    def close(self) -> None:
        self.peers.close()


def require_peers(schedule: Schedule, layout: Layout) -> None:
    """Raises `ScheduleError` if it evicts to another peer than the layout has."""
    theirs = Layout.of(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if theirs.peer(d) != layout.peer(d) and of_kinds(program.table, Kind.E).any():
            raise ScheduleError(
                f"the schedule evicts from device {d} to device {theirs.peer(d)}, in this pipeline the peer of "
                f"rank {d} is {layout.peer(d)}"
            )


def eviction_orders(plan: Plan) -> dict[int, EvictionOrder]:
    """The order of evictions of each rank that evicts to the plan's."""
    evictors = {plan.problem.stages[action.op.stage].device for action in plan.actions if action.op.kind == Kind.A}

    def activations(evictor: int, kind: Kind) -> tuple[StageMicrobatch, ...]:
        ops = plan.schedule.programs[evictor].ops()
        return tuple((op.stage, op.microbatch) for op in ops if op.kind == kind)

    return {d: EvictionOrder(activations(d, Kind.E), activations(d, Kind.L)) for d in evictors}


class _OnEvictor(StageHandler):
    def __init__(self, rank: Rank, peers: Peers) -> None:
        super().__init__(rank)
        self._peers = peers

    def _zeros(self, op: Op) -> list[Tensor]:
        """As many bytes as the peer expects, or sends."""
        io = self._stages[op.stage].io[self._rank.layout.microbatch_routes[op.microbatch]]
        return [torch.zeros(size, dtype=torch.uint8, device=self._rank.device) for size in io.block_bytes if size]


class _Evict(_OnEvictor):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._stages[op.stage].evict(op.microbatch, self._peers))

    def held_bytes(self, op: Op) -> int | None:
        """The copy only begins."""
        return None

    def abandon(self, op: Op, failed: bool) -> Sequence[Handle]:
        return self._peers.take_out(self._zeros(op))


class _Load(_OnEvictor):
    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._stages[op.stage].reload(op.microbatch, 0))

    def abandon(self, op: Op, failed: bool) -> Sequence[Handle]:
        return self._peers.bring_back(self._zeros(op))


class _OnPeer(Handler):
    """It has the same to do in a step that has failed: the other rank sends, and wants to receive."""

    def __init__(self, rank: Rank, peers: Peers) -> None:
        self._rank, self._peers = rank, peers

    def held_bytes(self, op: Op) -> int | None:
        return self._peers.held_bytes((op.stage, op.microbatch))

    def run(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        self._do(op)
        return Done()

    def abandon(self, op: Op, failed: bool) -> Sequence[Handle]:
        self._do(op)
        return ()

    def _do(self, op: Op) -> None:
        raise NotImplementedError


class _Accept(_OnPeer):
    def _do(self, op: Op) -> None:
        _, s, j, _ = op
        layout = self._rank.layout
        blocks = self._rank.io[s, layout.microbatch_routes[j]].block_bytes
        self._peers.accept(layout.placement[s], (s, j), [size for size in blocks if size])


class _Vacate(_OnPeer):
    def _do(self, op: Op) -> None:
        self._peers.vacate((op.stage, op.microbatch))
