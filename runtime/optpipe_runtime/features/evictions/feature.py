"""`Evictions`: the ops E, L, A and V of one rank, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from optpipe.errors import InputError, ScheduleError
from optpipe.model.ops import Kind, Op
from optpipe.model.program import of_kinds
from optpipe.schedule import Schedule
from optpipe.sizes import told_apart
from optpipe_runtime.execute.handler import Done, Feature, Handler
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.features.evictions.peers import EvictionOrder, Peers
from optpipe_runtime.lowering.plan import Plan, StageMicrobatch
from optpipe_runtime.measure.rounds import WARM_UP, routes
from optpipe_runtime.memory.clock import Clock
from optpipe_runtime.memory.engines import Handle
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Tensors
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.timer import Spread
from optpipe_runtime.stage.trial import Trial, Trials


class Evictions(Feature):
    """Making one is collective. `peers` moves the bytes."""

    def __init__(self, rank: Rank) -> None:
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
        return Done(copies=_send(self._stages[op.stage], op.microbatch, self._block_bytes(op), self.peers))

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
        return [size for size in self._block_bytes(op) if size]

    def _block_bytes(self, op: Op) -> tuple[int, ...]:
        return self._rank.io[op.stage, self._rank.forms[op.microbatch]].block_bytes

    # In a profile

    def profile(self, trials: Trials, clock: Clock, repeats: int) -> Mapping[int, Mapping[str, Spread]]:
        """Evicts the activations of one stage after the other, on the first route over it."""
        rank, rounds = self._rank, WARM_UP + repeats
        for s, owner in enumerate(rank.layout.placement):
            route = routes(rank, s)[0]
            blocks = rank.io[s, route].block_bytes
            rank.cpu_group.minimum(0)  # one link at a time
            if rank.layout.peer(owner) is None or not any(blocks):
                continue
            if owner == rank.number:
                trial = trials[s][route]
                freed = set()
                for r in range(rounds):
                    trial.times.recording = r >= WARM_UP
                    freed.add(self._try(trial, blocks))
                trial.sizes["evict_bytes"] = sum(blocks) if freed == {sum(blocks)} else 0  # 0: no eviction is possible
            elif rank.layout.peer(owner) == rank.number:
                activations = tuple((s, r) for r in range(rounds))
                self.peers.start_step({owner: EvictionOrder(activations, activations)})
                for activation in activations:
                    self.peers.accept(owner, activation, [size for size in blocks if size])
                    self.peers.vacate(activation)
        return {}

    def _try(self, trial: Trial, blocks: tuple[int, ...]) -> int:
        """Runs F, E, D and L. Returns the bytes that the drop freed."""
        trial.forward(0)
        stage = trial.stage
        held = stage.held_bytes(0)
        with trial.times.timing("evict_ms"):
            _send(stage, 0, blocks, self.peers)
            stage.drop(0, 0)
        freed = held - stage.held_bytes(0)
        with trial.times.timing("load_ms"):
            stage.reload(0, 0)
            stage.activation(0).restore()
        trial.forget(0)
        return freed


def _send(stage: StageRunner, microbatch: int, blocks: tuple[int, ...], peers: Peers) -> Sequence[Handle]:
    """E: the whole activation. The peer expects blocks of the sizes that were learned."""
    activation = stage.activation(microbatch)
    if activation.sizes() != blocks:
        now, first = told_apart(sum(activation.sizes()), sum(blocks))
        raise InputError(
            f"stage {stage.index} saves {now} for micro-batch {microbatch}, at the start it saved {first}: "
            "evicted activations must have the same sizes in every micro-batch"
        )
    return activation.offload(0, 1, peers)


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
