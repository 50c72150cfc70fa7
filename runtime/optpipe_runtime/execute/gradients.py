"""What becomes of a step's gradients: means over its micro-batches, and over the replicas while backwards still run.

As in torch.distributed.pipelining, each micro-batch's backward starts from its own loss, and the sum of gradients is
divided by the number of micro-batches when it is complete. So what an autograd function adds inside a backward, such as
an auxiliary loss of a mixture of experts, is averaged as the loss is. Unlike there, gradients of earlier steps stay as
they are: they are multiplied by the number before.

The reduction of a stage starts behind its last W: on CPU in a thread, on CUDA on a stream of its own, one at a time.
Replicas may run different schedules, and communicate in one process group for all stages. So all start their reductions
in the same order: the stage with the highest number first, because it is complete first in most schedules. A stage that
is complete before its turn waits for it. Only replicas that have agreed on their schedule reduce in its order. A
reduction is part of the other replicas' gradients, so none starts in a step that may still be undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.memory.engines import Handle, copy_engine
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import main_grad


class GradientMeans:
    """Of one step after the other. Without `scales` gradients stay those of the sum of the losses."""

    def __init__(self, stages: Mapping[int, StageRunner], replicas: Replicas, scales: bool) -> None:
        self._stages, self._replicas, self._scales = stages, replicas, scales
        self._divisor = 1
        self._users: Counter[int] = Counter()  # by parameter, so many stages that still add to its gradient

    def start_step(self, plan: Plan) -> None:
        """Before the first op."""
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
        self._divide(tensor for _, tensor in self._replicas.whole_gradients(s))

    @torch.no_grad()
    def _divide(self, sums: Iterable[Tensor]) -> None:
        if self._divisor > 1:
            for tensor in sums:
                local(tensor).div_(self._divisor)

    def _parameters(self, s: int) -> set[int]:
        """The identities of a stage's parameters, of sharded ones those of the shards."""
        plain = self._replicas.unsharded(s, self._stages[s].parameters())
        return {id(parameter) for parameter in (*plain, *self._replicas.shards(s))}

    def _sums(self, s: int) -> Iterator[tuple[int, Tensor]]:
        """What backwards of a stage add to, by parameter. Gradients of shards are means already."""
        for parameter in self._replicas.unsharded(s, self._stages[s].parameters()):
            for tensor in (parameter.grad, main_grad(parameter)):
                if tensor is not None:
                    yield id(parameter), tensor
        yield from self._replicas.whole_gradients(s)


# The gradients that a reduction reads, and the reduction.
Reduction = tuple[list[Tensor], Callable[[], None]]


class Reductions:
    """Of one step after the other."""

    def __init__(self, replicas: Replicas, device: torch.device) -> None:
        self._replicas = replicas
        self._engine = copy_engine(device) if replicas.reduced else None
        self._in_program_order = False
        self._complete: set[int] = set()
        self._last: dict[int, Handle] = {}  # the last reduction of each complete stage
        self._under_way: dict[int, Handle] = {}  # of stages whose gradients have not been let go
        self._read: dict[int, object] = {}  # the gradients that they read

    @property
    def any(self) -> bool:
        """Whether a stage here has replicas."""
        return bool(self._replicas.reduced)

    def start_step(self, in_program_order: bool = False) -> None:
        """`in_program_order`: all replicas run one schedule in this step, so each stage is reduced when it is
        complete."""
        self._in_program_order = in_program_order
        self._complete.clear()
        self._last.clear()

    def ended(self, s: int) -> bool:
        """Whether the gradients of a stage here are those of this step over all replicas. Does not wait."""
        if s not in self._replicas.reduced:
            return True
        end = self._last[s].end if s in self._last else None
        if end is None or (isinstance(end, torch.cuda.Event) and not end.query()):  # type: ignore[no-untyped-call]
            return False
        with self._replicas.exchanging():
            self._last[s].wait()
        return True

    def complete(self, s: int) -> None:
        """In a step that counts, after the last W of a stage here: starts the reductions whose turn it is."""
        self._complete.add(s)
        if self._in_program_order:
            if s in self._replicas.reduced:
                self._reduce_last(s)
            return
        for stage in self._replicas.reduced[len(self._last) :]:
            if not self._replicas.sharing[stage] <= self._complete:
                return
            self._reduce_last(stage)

    def start(self, s: int, reduction: Callable[[int], Reduction]) -> Handle:
        """Starts to reduce what a stage has added up. Nothing else may use these gradients from here on. On CUDA,
        memory that the compute stream has taken may be used on another one as long as something refers to it."""
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
            self._replicas.end_window(s)

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
        self._replicas.end_reductions()

    def close(self) -> None:
        """Ends the thread."""
        if self._engine is not None:
            self._engine.close()

    def _reduce_last(self, s: int) -> None:
        self._last[s] = self.start(s, self._replicas.reduction)
