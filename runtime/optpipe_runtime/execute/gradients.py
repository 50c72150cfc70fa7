"""What becomes of a step's gradients: means over its micro-batches, and over the replicas while backwards still run.

As in torch.distributed.pipelining, each micro-batch's backward starts from its own loss, and the sum of gradients is
divided by the number of micro-batches when it is complete. So what an autograd function adds inside a backward, such as
an auxiliary loss of a mixture of experts, is averaged as the loss is. Unlike there, gradients of earlier steps stay as
they are: they are multiplied by the number before.

The reduction of a stage starts behind its last W: on CPU in a thread, on CUDA on a stream of its own, one at a time.
Replicas may run different schedules, and communicate in one process group for all stages. So all start their reductions
in the same order: the stage with the highest number first, because it is complete first in most schedules. A stage that
is complete before its turn waits for it. A reduction is part of the other replicas' gradients, so none starts in a
step that may still be undone.

Replicas that run one schedule for one problem reduce in the order of its program. Then stages that are sharded over
them may be reduced several times a step (ZeRO-2), so that a rank holds few whole gradients (Lin et al. 2025,
ChronosPipe, section 4.3). The first backward of one stage more than may be whole needs the room of the stage whose last
backward or W lies longest ago: that one is reduced behind this op, at once, and waited for where its room is needed.
Every wait is for an op that comes earlier in the common order of all ops (`lowering.prepare`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe.model.ops import Op
from optpipe_runtime.lowering.plan import WEIGHT, Plan
from optpipe_runtime.memory.engines import Handle, copy_engine
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import main_grad
from optpipe_runtime.torch_private.tensors import local


class GradientMeans:
    """Of one step after the other. Without `scales` gradients stay those of the sum of the losses."""

    def __init__(self, stages: Mapping[int, StageRunner], replicas: Replicas, scales: bool) -> None:
        self._stages, self._replicas, self._scales = stages, replicas, scales
        self._divisor = 1
        self._users: Counter[int] = Counter()  # by parameter, the number of stages that still add to its gradient

    def start_step(self, plan: Plan) -> None:
        self._divisor = plan.problem.microbatches if self._scales else 1
        stages = {op.stage for op in plan.completing}
        self._users = Counter(parameter for s in stages for parameter in self._parameters(s))
        if self._divisor > 1:
            earlier = {id(tensor): tensor for s in stages for _, tensor in self._sums(s)}
            with torch.no_grad():
                for tensor in earlier.values():
                    local(tensor).mul_(self._divisor)

    def factors(self, s: int, weights: Sequence[float]) -> list[float]:
        """Collective over the replicas of a stage where routes end: by what the loss of each micro-batch is multiplied,
        so that the gradients become those of the losses' mean over all replicas, weighted so; or of their weighted sum
        here, without `scales`."""
        if not self._scales:
            return list(weights)
        total, replicas = self._replicas.total(s, sum(weights))
        return [weight * len(weights) * replicas / total for weight in weights]

    def complete(self, s: int) -> None:
        """After the last W of a stage: divides the sums to which no other stage adds."""
        self._users.subtract(self._parameters(s))
        self._divide(tensor for parameter, tensor in self._sums(s) if not self._users[parameter])

    def end_window(self, s: int) -> None:
        """Divides what is about to be reduced of a stage that is reduced several times a step."""
        self._divide(tensor for _, tensor in self._replicas.sharded[s].whole_gradients())

    @torch.no_grad()
    def _divide(self, sums: Iterable[Tensor]) -> None:
        if self._divisor > 1:
            for tensor in sums:
                local(tensor).div_(self._divisor)

    def _parameters(self, s: int) -> set[int]:
        """The identities of a stage's parameters, of sharded ones those of the shards."""
        plain = self._replicas.sharded[s].unsharded(self._stages[s].parameters())
        return {id(parameter) for parameter in (*plain, *self._replicas.sharded[s].shards())}

    def _sums(self, s: int) -> Iterator[tuple[int, Tensor]]:
        """What backwards of a stage add to, by parameter. Gradients of shards are means already."""
        for parameter in self._replicas.sharded[s].unsharded(self._stages[s].parameters()):
            for tensor in (parameter.grad, main_grad(parameter)):
                if tensor is not None:
                    yield id(parameter), tensor
        yield from self._replicas.sharded[s].whole_gradients()


class Windows(NamedTuple):
    """Of one rank in one step. `ends`: the ops behind which the gradients of their stage leave, and before the stage's
    last one. `room`: for each op that needs the room of another stage's gradients, that stage."""

    ends: frozenset[Op]
    room: Mapping[Op, int]


NO_WINDOWS = Windows(frozenset(), {})


def windows(ops: Iterable[Op], whole: int) -> Windows:
    """The windows of a rank's ops, in program order, if it may hold `whole` stages' whole gradients."""
    held: dict[int, Op] = {}  # by stage its last op that adds to them; the stage that was used last comes last
    left: dict[int, Op] = {}  # the ops behind which stages left
    ends: set[Op] = set()
    room: dict[Op, int] = {}
    for op in ops:
        if op.kind not in WEIGHT:
            continue
        s = op.stage
        if s in left:
            ends.add(left.pop(s))
        if s not in held and len(held) == whole:
            oldest = next(iter(held))
            left[oldest] = held.pop(oldest)
            room[op] = oldest
        held.pop(s, None)
        held[s] = op
    return Windows(frozenset(ends), room)


@lru_cache(maxsize=1)
def _windows_of(plan: Plan, whole: int) -> Windows:
    return windows((action.op for action in plan.actions), whole)


def require_windows(replicas: Replicas, whole: int | None) -> None:
    """Raises `InputError` if the stages here cannot be reduced in windows, with `whole` of them whole at a time."""
    if whole is None:
        return
    if not isinstance(whole, int) or whole < 1:
        raise InputError(f"whole_gradients = {whole!r}: must be an integer, at least 1, or None for all stages")
    for s, module in replicas.modules.items():
        if any(p.requires_grad for p in module.parameters()) and not replicas.sharded[s].is_sharded:
            raise InputError(
                f"whole_gradients = {whole}: stage {s} is not sharded over replicas, so its gradients stay whole: use "
                "fully_shard"
            )
        if len(replicas.sharing[s]) > 1:
            raise InputError(
                f"whole_gradients = {whole}: stages {sorted(replicas.sharing[s])} share a parameter, whose gradient is "
                "whole until both are complete: leave out whole_gradients"
            )
    spans = sorted({tuple(sorted(ranks)) for s in replicas.modules if (ranks := replicas.sharded[s].ranks)})
    if len(spans) > 1:
        raise InputError(
            f"whole_gradients = {whole}: a rank's stages must be sharded over the same ranks, these are over {spans}"
        )


# The gradients that a reduction reads, and the reduction.
Reduction = tuple[list[Tensor], Callable[[], None]]


class Reductions:
    """Of one step after the other."""

    def __init__(self, replicas: Replicas, cpu_group: CpuGroup, device: torch.device, whole: int | None = None) -> None:
        self.whole = whole  # of how many stages gradients may be whole; None: of all
        self.in_windows = False  # whether this step runs in windows: of one schedule, on which the replicas have agreed
        self._replicas, self._cpu_group = replicas, cpu_group
        self._engine = copy_engine(device) if replicas.reduced else None
        self._complete: set[int] = set()
        self._last: dict[int, Handle] = {}  # the last reduction of each complete stage
        self._under_way: dict[int, Handle] = {}  # of stages whose gradients have not been let go
        self._read: dict[int, object] = {}  # the gradients that they read
        self._waiting: dict[int, list[Callable[[], object]]] = {}  # by stage, what runs when its reduction has ended

    def start_step(self, plan: Plan | None, on_trial: bool) -> None:
        """Collective over the replicas, if there may be windows. `plan` is what runs in this step for certain, None if
        that may change; `on_trial`: the step can be undone if a rank runs out of memory."""
        self._complete.clear()
        self._last.clear()
        self._waiting.clear()
        if self.whole is not None:
            agreed = self._replicas.agree(0 if plan is None else plan.number ^ self.whole)
            # On all ranks of the pipeline, where that decides whether the step can be undone.
            self.in_windows = bool(self._cpu_group.minimum(agreed)[0]) if on_trial else agreed

    def windows(self, plan: Plan) -> Windows:
        return _windows_of(plan, self.whole) if self.in_windows and self.whole is not None else NO_WINDOWS

    def complete(self, s: int) -> None:
        """In a step that counts, after the last W of a stage here: starts the reductions whose turn it is."""
        self._complete.add(s)
        if self.in_windows:
            if s in self._replicas.reduced:
                self._reduce_last(s)
            return
        for stage in self._replicas.reduced[len(self._last) :]:
            if not self._replicas.sharing[stage] <= self._complete:
                return
            self._reduce_last(stage)

    def _reduce_last(self, s: int) -> None:
        self._last[s] = self.start(s, self._replicas.reduction)

    def end_window(self, s: int) -> None:
        """In a step that counts, behind the last op of a window: starts to reduce what it has added up."""
        self.start(s, lambda s: self._replicas.sharded[s].take_window())

    def start(self, s: int, reduction: Callable[[int], Reduction]) -> Handle:
        """Starts to reduce what a stage has added up. Nothing else may use these gradients from here on. Something
        must refer to them: on CUDA memory that the compute stream has taken may then be used on another one."""
        assert self._engine is not None
        with self._replicas.exchanging():
            self._read[s], reduce = reduction(s)
            self._under_way[s] = self._engine.run(reduce)
        return self._under_way[s]

    def let_go(self, s: int) -> None:
        """Waits until what was started last of a stage has been reduced, and lets go of what it read."""
        if s in self._under_way:
            with self._replicas.exchanging():
                self._under_way.pop(s).wait()
            del self._read[s]
            self._replicas.sharded[s].end_reduction()

    def when_ended(self, s: int, run: Callable[[], object]) -> None:
        """Runs this once the gradients of a stage here are those of this step over all replicas: at once, in `resume`,
        or at the end of the step. Never waits: replicas that run other schedules could wait for each other for ever."""
        self._waiting.setdefault(s, []).append(run)
        self.resume()

    def resume(self) -> None:
        """After an op: runs what waited for reductions that have ended."""
        for s in [s for s in self._waiting if self._ended(s)]:
            for run in self._waiting.pop(s):
                run()

    def _ended(self, s: int) -> bool:
        if s not in self._replicas.reduced:
            return True
        end = self._last[s].end if s in self._last else None
        if end is None or (isinstance(end, torch.cuda.Event) and not end.query()):  # type: ignore[no-untyped-call]
            return False
        with self._replicas.exchanging():
            self._last[s].wait()
        return True

    def finish(self) -> None:
        """Collective over the replicas, at the end of a step that counts: starts the reductions that are left, and
        waits for all. May be called twice."""
        for stage in self._replicas.reduced:
            if stage not in self._last:
                self._reduce_last(stage)
        with self._replicas.exchanging():
            for last in self._last.values():  # in the order of the thread or stream, behind earlier ones
                last.wait()
        self._under_way.clear()
        self._read.clear()
        for sharded in self._replicas.sharded.values():
            sharded.end_reduction()
        while self._waiting:
            for run in self._waiting.pop(next(iter(self._waiting))):
                run()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
