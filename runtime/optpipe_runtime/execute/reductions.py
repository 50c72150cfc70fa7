"""`Reductions`: gradients are reduced over the replicas while this rank's backwards still run.

The reduction of a stage starts behind its last W: on CPU in a thread, on CUDA on a stream of its own, one at a time.
Replicas may run different schedules, and communicate in one process group for all stages. So all of them start their
reductions in the same order, whatever they run: the stage with the highest number first, because it is complete first
in most schedules. A stage that is complete before its turn waits for it, at most until the end of the step.

A reduction cannot be taken back, because it is part of the other replicas' gradients. So none starts in a step that may
still be undone.
"""

from __future__ import annotations

import torch

from optpipe_runtime.memory.engines import Handle, copy_engine
from optpipe_runtime.ranks.replicas import Replicas


class Reductions:
    """Of one step after the other."""

    def __init__(self, replicas: Replicas, device: torch.device) -> None:
        self._replicas = replicas
        self._engine = copy_engine(device) if replicas.reduced else None
        self._complete: set[int] = set()
        self._started: dict[int, Handle] = {}
        self._read: list[object] = []  # the gradients that they read

    @property
    def any(self) -> bool:
        """Whether a stage here has replicas."""
        return bool(self._replicas.reduced)

    def start_step(self) -> None:
        self._complete.clear()
        self._started.clear()

    def ended(self, s: int) -> bool:
        """Whether the gradients of a stage here are those of this step over all replicas. Does not wait."""
        if s not in self._replicas.reduced:
            return True
        end = self._started[s].end if s in self._started else None
        if end is None or (isinstance(end, torch.cuda.Event) and not end.query()):  # type: ignore[no-untyped-call]
            return False
        with self._replicas.exchanging():
            self._started[s].wait()
        return True

    def complete(self, s: int) -> None:
        """In a step that counts, after the last W of a stage here: starts the reductions whose turn it is."""
        self._complete.add(s)
        for stage in self._replicas.reduced[len(self._started) :]:
            if not self._replicas.sharing[stage] <= self._complete:
                return
            self._start(stage)

    def finish(self) -> None:
        """Collective over the replicas, at the end of a step that counts: starts the reductions that are left, and
        waits for all. May be called twice."""
        for stage in self._replicas.reduced[len(self._started) :]:
            self._start(stage)
        with self._replicas.exchanging():
            for started in self._started.values():
                started.wait()
        self._read.clear()
        self._replicas.end_reductions()

    def close(self) -> None:
        """Ends the thread."""
        if self._engine is not None:
            self._engine.close()

    def _start(self, stage: int) -> None:
        """Nothing else may use the stage's gradients from here on. On CUDA, memory that the compute stream has taken
        may be used on another one as long as something refers to it."""
        assert self._engine is not None
        with self._replicas.exchanging():
            read, reduce = self._replicas.reduction(stage)
            self._read.append(read)
            self._started[stage] = self._engine.run(reduce)
