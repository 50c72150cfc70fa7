"""`Reductions`: gradients are reduced over the replicas while this rank's backwards still run.

The reduction of a stage starts behind its last W: on CPU in a thread, on CUDA on a stream of its own, one at a time.
Replicas may run different schedules, and communicate in one process group for all stages. So all of them start their
reductions in the same order, whatever they run: the stage with the highest number first, because it is complete first
in most schedules. A stage that is complete before its turn waits for it, at most until the end of the step.

If the replicas have agreed on their schedule, a step may be in windows (`lowering.windows`): then reductions start in
program order, several of a stage.

A reduction cannot be taken back, because it is part of the other replicas' gradients. So none starts in a step that may
still be undone.
"""

from __future__ import annotations

import torch

from optpipe_runtime.memory.engines import Handle, copy_engine
from optpipe_runtime.ranks.replicas import Replicas


class Reductions:
    """Of one step after the other.

    Attributes
    ----------
    in_windows
        Whether this step is in windows, on all replicas.
    """

    def __init__(self, replicas: Replicas, device: torch.device) -> None:
        self._replicas = replicas
        self._engine = copy_engine(device) if replicas.reduced else None
        self.in_windows = False
        self._complete: set[int] = set()
        self._started: dict[int, Handle] = {}  # the last reduction of each complete stage
        self._of_windows: dict[int, Handle] = {}  # under way, of stages that come again
        self._read: dict[int, object] = {}  # the gradients that they read

    @property
    def any(self) -> bool:
        """Whether a stage here has replicas."""
        return bool(self._replicas.reduced)

    def start_step(self, in_windows: bool) -> None:
        self.in_windows = in_windows
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
        if self.in_windows:
            if s in self._replicas.reduced:
                self._start(s)
            return
        for stage in self._replicas.reduced[len(self._started) :]:
            if not self._replicas.sharing[stage] <= self._complete:
                return
            self._start(stage)

    def finish(self) -> None:
        """Collective over the replicas, at the end of a step that counts: starts the reductions that are left, and
        waits for all. May be called twice."""
        for stage in self._replicas.reduced:
            if stage not in self._started:
                self._start(stage)
        with self._replicas.exchanging():
            for started in self._started.values():  # in the order of the thread or stream, behind those of windows
                started.wait()
        self._of_windows.clear()
        self._read.clear()
        self._replicas.end_reductions()

    def end_window(self, s: int) -> None:
        """In a step that counts and is in windows, after the last op of a window of a stage: starts to reduce what it
        has added up."""
        assert self._engine is not None
        with self._replicas.exchanging():
            self._read[s], reduce = self._replicas.window(s)
            self._of_windows[s] = self._engine.run(reduce)

    def make_room(self, s: int) -> None:
        """Before an op that needs the room of a stage's whole gradients: waits until they are reduced."""
        started = self._of_windows.pop(s, None) or self._started.get(s)
        if started is not None:
            with self._replicas.exchanging():
                started.wait()
            del self._read[s]
            self._replicas.end_window(s)

    def close(self) -> None:
        """Ends the thread."""
        if self._engine is not None:
            self._engine.close()

    def _start(self, stage: int) -> None:
        """Nothing else may use the stage's gradients from here on. On CUDA, memory that the compute stream has taken
        may be used on another one as long as something refers to it."""
        assert self._engine is not None
        with self._replicas.exchanging():
            self._read[stage], reduce = self._replicas.reduction(stage)
            self._started[stage] = self._engine.run(reduce)
