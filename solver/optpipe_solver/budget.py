"""A clock for CP-SAT."""

from __future__ import annotations

from ortools.sat.python import cp_model

from optpipe_solver.clock import Clock

COUNTED_PER_S = 0.25  # CP-SAT's deterministic seconds in one second of a quiet core
OP_S = 2.5e-5  # for each op that Python puts into a model and takes out of it again


class Budget(Clock):
    """A clock that limits CP-SAT's solvers, and that counts what they used."""

    def __init__(self, seconds: float, threads: int) -> None:
        super().__init__(seconds, counts=threads == 1)
        self._threads = threads

    def left(self) -> float:
        return self.left_s

    def handled(self, ops: int) -> None:
        """Count ops that were put into a model and taken out of it."""
        self.count(ops, 1 / OP_S)

    def allot(self, solver: cp_model.CpSolver, seconds: float) -> None:
        """Limit a solver to these seconds, or to those left."""
        solver.parameters.num_workers = self._threads
        solver.parameters.max_time_in_seconds = self.wall_left_s if self.counts else min(seconds, self.left_s)
        if self.counts:
            solver.parameters.max_deterministic_time = COUNTED_PER_S * min(seconds, self.left_s)

    def ran(self, solver: cp_model.CpSolver) -> float:
        """Take off the seconds that the solver used, and return them."""
        used = float(solver.response_proto.deterministic_time / COUNTED_PER_S if self.counts else solver.wall_time)
        self.spend(used)
        return used
