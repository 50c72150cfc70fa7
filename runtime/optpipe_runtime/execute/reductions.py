"""`Reductions`: gradients are reduced over the replicas while this rank's backwards still run.

The reduction of a stage starts behind its last W: on CPU in a thread, on CUDA on a stream of its own, one at a time.
Replicas may run different schedules, and communicate in one process group for all stages. So all of them start their
reductions in the same order, whatever they run: the stage with the highest number first, because it is complete first
in most schedules. A stage that is complete before its turn waits for it, at most until the end of the step. Only
replicas that have agreed on their schedule reduce in its order (`start_step`).

A reduction cannot be taken back, because it is part of the other replicas' gradients. So none starts in a step that may
still be undone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optpipe_runtime.memory.engines import Handle, copy_engine
from optpipe_runtime.ranks.replicas import Replicas

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
