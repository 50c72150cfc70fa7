"""Evictions (ops E, L, A, V): activations that wait for their backward on another rank's device (Kim et al., "BPipe:
Memory-Balanced Pipeline Parallelism for Training Large Language Models").

The evicting rank sends at E and receives at L. Its peer makes room at A; from then on the bytes can come. The peer
sends them back as soon as they are there, so no op of its own program has to stand between. At V it waits until they
have left, and frees the room.

Each direction of each pair of ranks has a process group of its own. Messages have no tags. So the peer receives in the
order in which the other's program evicts, and sends in the order in which it loads, whatever the order of its own A and
V: each transfer starts when there is room for it and for all before it. Evictions and loads are one stream to
`simulate`, in order, so no rank waits here that would not wait there.

The peer is ready from A on, long before E or L. Over NCCL a kernel as wide as the link would be waiting, on
multiprocessors that compute needs. So the evicting rank announces each transfer by one byte, and only the kernel for
that byte waits. Not measured on CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optpipe.errors import InputError, ScheduleError
from optpipe.model.ops import Kind, Op
from optpipe.model.program import Program, of_kinds
from optpipe.schedule import Schedule
from optpipe.text import distinct_sizes
from optpipe_runtime.execute.rank import Done, Feature, Handler, Rank
from optpipe_runtime.execute.report import StepRecord
from optpipe_runtime.lowering.plan import Plan, StageMicrobatch
from optpipe_runtime.measure.together import WARM_UP, routes
from optpipe_runtime.memory.engines import Clock, CopyEngine, Handle, copy_engine
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import Subgroup, Transfer
from optpipe_runtime.stage.io import Tensors
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.trial import Spread, Trial, Trials

# The activations that one rank evicts to its peer, and those that it loads back, each in program order.
EvictionOrder = tuple[tuple[StageMicrobatch, ...], tuple[StageMicrobatch, ...]]


class _Direction(NamedTuple):
    group: Subgroup
    engine: CopyEngine
    evicting: bool  # whether this rank is the one that evicts
    byte: Tensor

    def send(self, pieces: Sequence[Tensor], to: int, after: Handle | None = None) -> Handle:
        return self._start(self.group.send, pieces, to, after)

    def receive(self, pieces: Sequence[Tensor], source: int) -> Handle:
        return self._start(self.group.receive, pieces, source)

    def _start(
        self, move: Callable[[Tensor, int], Transfer], pieces: Sequence[Tensor], other: int, after: Handle | None = None
    ) -> Handle:
        def work() -> None:
            if after is not None:
                after.wait()
            (self.group.send if self.evicting else self.group.receive)(self.byte, other).wait()
            for transfer in [move(piece, other) for piece in pieces]:
                transfer.wait()

        return self.engine.run(work)


@dataclass
class _Hosted:
    """What this rank keeps for another."""

    pieces: list[Tensor]
    received: Handle | None = None
    returned: Handle | None = None


class Evictions(Feature):
    """One rank's evictions to its peer, as a `Destination`, and what it keeps for others. Making one is collective."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._stages = rank, rank.stages
        self._out: dict[int, _Direction] = {}  # by the evicting rank
        self._back: dict[int, _Direction] = {}
        for evictor, acceptor in ((a, b) for a, b in enumerate(rank.layout.peers) if b is not None):
            for directions in (self._out, self._back):
                group = rank.team.subgroup((evictor, acceptor), rank.device)
                if rank.number in (evictor, acceptor):
                    byte = torch.zeros(1, dtype=torch.uint8, device=rank.device)
                    is_evicting = rank.number == evictor
                    directions[evictor] = _Direction(group, copy_engine(rank.device), is_evicting, byte)
        self._hosted: dict[StageMicrobatch, _Hosted] = {}
        # By evicting rank, the activations that are still to come, and to go back.
        self._coming: dict[int, tuple[deque[StageMicrobatch], deque[StageMicrobatch]]] = {}
        self.handlers = {
            Kind.E: Handler(self._evict, abandon=lambda op, _: self.take_out(self._zeros(op))),
            Kind.L: Handler(self._load, rank.held_bytes, abandon=lambda op, _: self.bring_back(self._zeros(op))),
            Kind.A: self._on_peer(self._accept),
            Kind.V: self._on_peer(lambda op: self._free((op.stage, op.microbatch))),
        }

    def require(self, schedule: Schedule, layout: Layout) -> None:
        require_peers(schedule, layout)

    def start(self, plan: Plan, evaluating: bool) -> None:
        if evaluating:
            return
        if len(set(self._rank.forms)) > len(self._rank.layout.routes) and any(map(_evicts, plan.schedule.programs)):
            raise InputError("the schedule evicts activations: the micro-batches of a step must then have equal shapes")
        self._expect(eviction_orders(plan))

    def _expect(self, evictions: Mapping[int, EvictionOrder]) -> None:
        self._coming = {evictor: (deque(evicted), deque(loaded)) for evictor, (evicted, loaded) in evictions.items()}

    def close(self) -> None:
        for direction in (*self._out.values(), *self._back.values()):
            direction.engine.close()

    # On the rank that evicts

    def _evict(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._send(self._stages[op.stage], op.microbatch, self._block_bytes(op)))

    def _send(self, stage: StageRunner, microbatch: int, blocks: tuple[int, ...]) -> Sequence[Handle]:
        """The whole activation. The peer expects blocks of the sizes that were learned."""
        activation = stage.activation(microbatch)
        if activation.sizes() != blocks:
            now, first = distinct_sizes(sum(activation.sizes()), sum(blocks))
            raise InputError(
                f"stage {stage.index} saves {now} for micro-batch {microbatch}, at the start it saved {first}: "
                "evicted activations must have the same sizes in every micro-batch"
            )
        return activation.offload(0, 1, self)

    def take_out(self, pieces: Sequence[Tensor]) -> Sequence[Handle]:
        return [self._out[self._rank.number].send(pieces, self._peer)]

    def _load(self, step: StepRecord, op: Op, received: Tensors) -> Done:
        return Done(copies=self._stages[op.stage].reload(op.microbatch, 0))

    def bring_back(self, targets: Sequence[Tensor]) -> Sequence[Handle]:
        return [self._back[self._rank.number].receive(targets, self._peer)]

    def release(self) -> None:
        """The peer frees the room, at V."""

    @property
    def _peer(self) -> int:
        peer = self._rank.layout.peer(self._rank.number)
        assert peer is not None
        return peer

    def _zeros(self, op: Op) -> list[Tensor]:
        """Of as many bytes as the peer expects, or sends."""
        return [torch.zeros(size, dtype=torch.uint8, device=self._rank.device) for size in self._sizes(op)]

    # On its peer

    def _on_peer(self, do: Callable[[Op], None]) -> Handler:
        """In a step that fails here it has the same to do, because the other rank sends and receives."""

        def run(step: StepRecord, op: Op, received: Tensors) -> None:
            do(op)

        def abandon(op: Op, failed: bool) -> Sequence[Handle]:
            do(op)
            return ()

        return Handler(run, self._hosted_bytes, abandon=abandon)

    def _hosted_bytes(self, op: Op) -> int:
        """Device bytes that this rank holds for another rank's activation."""
        hosted = self._hosted.get((op.stage, op.microbatch))
        return 0 if hosted is None else sum(piece.nbytes for piece in hosted.pieces)

    def _accept(self, op: Op) -> None:
        self._make_room(self._rank.layout.placement[op.stage], (op.stage, op.microbatch), self._sizes(op))

    def _make_room(self, evictor: int, activation: StageMicrobatch, sizes: Sequence[int]) -> None:
        """A: for blocks of these bytes."""
        blocks = [torch.empty(size, dtype=torch.uint8, device=self._rank.device) for size in sizes]
        self._hosted[activation] = _Hosted(blocks)
        evicted, loaded = self._coming[evictor]
        while evicted and (hosted := self._hosted.get(evicted[0])):
            hosted.received = self._out[evictor].receive(hosted.pieces, evictor)
            evicted.popleft()
        while loaded and (hosted := self._hosted.get(loaded[0])) and hosted.received:
            hosted.returned = self._back[evictor].send(hosted.pieces, evictor, hosted.received)
            loaded.popleft()

    def _free(self, activation: StageMicrobatch) -> None:
        """V: waits until the bytes have left, and frees the room."""
        hosted = self._hosted.pop(activation)
        assert hosted.returned is not None, "what is loaded earlier was also accepted earlier"
        hosted.returned.wait()

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
                self._expect({owner: (activations, activations)})
                for activation in activations:
                    self._make_room(owner, activation, [size for size in blocks if size])
                    self._free(activation)
        return {}

    def _try(self, trial: Trial, blocks: tuple[int, ...]) -> int:
        """Runs F, E, D and L. Returns the bytes that the drop freed."""
        trial.forward(0)
        stage = trial.stage
        held = stage.held_bytes(0)
        with trial.times.timing("evict_ms"):
            self._send(stage, 0, blocks)
            stage.drop(0, 0)
        freed = held - stage.held_bytes(0)
        with trial.times.timing("load_ms"):
            stage.reload(0, 0)
            stage.activation(0).restore()
        trial.forget(0)
        return freed


def _evicts(program: Program) -> bool:
    return bool(of_kinds(program.table, Kind.E).any())


def require_peers(schedule: Schedule, layout: Layout) -> None:
    """Raises `ScheduleError` if it evicts to another peer than the layout has."""
    scheduled = Layout.from_problem(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if scheduled.peer(d) != layout.peer(d) and _evicts(program):
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

    return {d: (activations(d, Kind.E), activations(d, Kind.L)) for d in evictors}
