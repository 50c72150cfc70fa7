"""What an engine may still spend of its time."""

from __future__ import annotations

import time

from ortools.sat.python import cp_model

COUNTED_PER_S = 0.25  # CP-SAT's deterministic seconds in one second of a quiet core
OP_S = 2.5e-5  # for each op that Python puts into a model and takes out of it again
BACKSTOP = 2.0  # where work is counted, the clock ends what takes this times as long


class Budget:
    """Seconds of the clock or, with one thread, of work that is counted, so that the same request has the same answer
    on a busy machine."""

    def __init__(self, seconds: float, threads: int) -> None:
        self._threads, self._counts = threads, threads == 1
        self._seconds, self._spent = seconds, 0.0
        self._ends = time.monotonic() + seconds * (BACKSTOP if self._counts else 1.0)

    def left(self) -> float:
        """The seconds left. None are left when the clock says so, whatever is counted."""
        clock = max(0.0, self._ends - time.monotonic())
        return max(0.0, self._seconds - self._spent) if self._counts and clock else clock

    @property
    def spent_s(self) -> float | None:
        """The seconds used by count; None where the clock counts."""
        return self._spent if self._counts else None

    def handled(self, ops: int) -> None:
        """Count ops that were put into a model and taken out of it."""
        self._spent += OP_S * ops

    def allot(self, solver: cp_model.CpSolver, seconds: float) -> None:
        """Limit a solver to these seconds, or to those left."""
        solver.parameters.num_workers = self._threads
        solver.parameters.max_time_in_seconds = (
            max(0.0, self._ends - time.monotonic()) if self._counts else min(seconds, self.left())
        )
        if self._counts:
            solver.parameters.max_deterministic_time = COUNTED_PER_S * min(seconds, self.left())

    def ran(self, solver: cp_model.CpSolver) -> float:
        """Take off the seconds that the solver used, and return them."""
        used = solver.response_proto.deterministic_time / COUNTED_PER_S if self._counts else solver.wall_time
        self._spent += used
        return float(used)
