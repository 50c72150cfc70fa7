"""What a backend is asked to solve, and what it is: a function of a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from optpipe.errors import SolverError
from optpipe.model.arrays import Floats
from optpipe_solver.milp.rows import Clause, Rows

# Of feasibility and of integrality. With times up to a thousand, what leaks through a big-M stays far below `MARGIN`.
TOLERANCE = 1e-8
MARGIN = 1e-6  # bounds are lowered by that, so that the tolerance makes none wrong
ROUNDS = 20  # of cuts before the search


class UnavailableError(SolverError):
    """A backend is not installed, has no licence for a model of this size, or fails; says so."""


@dataclass(frozen=True)
class Limits:
    """What a solve may take: until when (`time.monotonic`), on how many threads; and its seed."""

    until: float
    threads: int
    seed: int

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - time.monotonic())


@dataclass(frozen=True)
class Task:
    """Minimize one variable subject to rows.

    Attributes
    ----------
    objective
        The number of the variable (Eq. 2).
    start
        Values of binaries to start from, empty to start from nothing.
    on_solution
        Gets each better x as soon as the backend tells of it.
    on_bound
        Gets each better lower bound, at most `MARGIN` too low.
    violated
        Returns valid cuts that a solution of the linear relaxation violates.
    """

    rows: Rows
    objective: int
    start: dict[int, float]
    limits: Limits
    on_solution: Callable[[Floats], None]
    on_bound: Callable[[float], None]
    violated: Callable[[Floats], list[Clause]] | None = None


class Minimize(Protocol):
    """A backend. Returns when the optimum is proven or time is up. Raises UnavailableError."""

    def __call__(self, task: Task) -> None: ...


def cut_at_root(task: Task, relaxed: Callable[[], Floats | None]) -> None:
    """Adds the cuts that the linear relaxation violates, round after round, for backends that take none while they
    search. `relaxed` solves the relaxation of the rows as they are."""
    for _ in range(ROUNDS if task.violated else 0):
        x = relaxed()
        cuts = task.violated(x) if task.violated and x is not None else []
        if not cuts:
            break
        for cut in cuts:
            task.rows.clause(*cut)
