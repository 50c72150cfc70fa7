"""What a backend is asked to solve, and how it ends. A backend is a function from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from optpipe.errors import SolverError
from optpipe.model.arrays import Floats
from optpipe_solver.milp.rows import Rows

# Of feasibility and of integrality. With times up to a thousand, what leaks through a big-M stays far below `MARGIN`.
TOLERANCE = 1e-8
MARGIN = 1e-6  # bounds are lowered by that, so that the tolerance makes none wrong


class UnavailableError(SolverError):
    """A backend is not installed, has no licence for a model of this size, or fails; says so."""


@dataclass(frozen=True)
class Limits:
    """What a solve may take: until when (`time.monotonic`), on how many threads; its seed."""

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
    on_start
        Gets the name of the solver before it begins.
    """

    rows: Rows
    objective: int
    start: dict[int, float]
    limits: Limits
    on_solution: Callable[[Floats], None]
    on_bound: Callable[[float], None]
    on_start: Callable[[str], None] = lambda solver: None


Status = Literal["optimal", "infeasible", "time is up", "ended", "not ended"]


@dataclass(frozen=True)
class Outcome:
    """How a search ended: which solver it was, its status, the best bound in the model's time, how many nodes it looked
    at, None where the solver does not say, and how long it took."""

    solver: str
    status: Status
    bound: float | None = None
    nodes: int | None = None
    seconds: float = 0.0


Minimize = Callable[[Task], Outcome]  # returns when the optimum is proven or time is up; raises UnavailableError
