"""What solves a model: a backend is a function `minimize(task)`, loaded only when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from optpipe.errors import InputError, SolverError
from optpipe.model.arrays import Floats
from optpipe_solver.milp.rows import Clause, Rows

# of feasibility and of integrality: with times up to a thousand, what leaks through a big-M stays far below `MARGIN`
TOLERANCE = 1e-8
MARGIN = 1e-6  # by which bounds are lowered, so that the tolerance makes none wrong
ROUNDS = 20  # of cuts before the search


class UnavailableError(SolverError):
    """A backend that is not installed, has no licence for a model of this size, or fails; says so."""


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
    """Minimize the variable number `objective` subject to `rows`, from the binaries in `start` (empty: from nothing).

    `on_solution` gets each better x as soon as the backend tells of it, `on_bound` each better lower bound, at most
    `MARGIN` too low. `violated`, if there is one, gives valid cuts that a solution of the linear relaxation violates.
    """

    rows: Rows
    objective: int
    start: dict[int, float]
    limits: Limits
    on_solution: Callable[[Floats], None]
    on_bound: Callable[[float], None]
    violated: Callable[[Floats], list[Clause]] | None = None


class Minimize(Protocol):
    """A backend: returns when the task's optimum is proven or its time is up. Raises `UnavailableError`."""

    def __call__(self, task: Task) -> None: ...


def minimize(solver: str, task: Task, tell: Callable[[str], None]) -> str:
    """Solves by `auto`, `highs`, `gurobi`, `pulp` or `pulp:NAME`, or, where that is not available, says why and solves
    by HiGHS.

    Returns the name of the solver that did it. Raises `InputError` for any other name.
    """
    try:
        backend(solver)(task)
    except UnavailableError as reason:
        tell(f"{reason}; HiGHS solves it instead")
        solver = "highs"
        backend(solver)(task)
    return solver


def backend(solver: str) -> Minimize:
    """The backend of that name. `auto` is Gurobi where a licence of the user's own is found: the one that comes with
    gurobipy is for small models, and not for production."""
    name, _, within = solver.partition(":")
    if solver == "auto":
        return backend("gurobi" if _gurobi_licensed() else "highs")
    try:
        if solver == "highs":
            from optpipe_solver.milp import highs

            return highs.minimize
        if solver == "gurobi":
            from optpipe_solver.milp import gurobi

            return gurobi.minimize
        if name == "pulp":
            from optpipe_solver.milp import pulp

            return pulp.solver(within)
    except ImportError as error:
        raise UnavailableError(
            f"solver = {solver!r}: {error.name} is not installed (pip install 'optpipe[{name}]')"
        ) from None
    raise InputError(f"solver = {solver!r}: the solvers are auto, highs, gurobi, pulp and pulp:NAME")


def _gurobi_licensed() -> bool:
    try:
        from optpipe_solver.milp import gurobi
    except ImportError:
        return False
    return gurobi.licensed()


def cut_at_root(task: Task, relaxed: Callable[[], Floats | None]) -> None:
    """Adds to the task's rows the cuts that its linear relaxation violates, round after round, for backends that take
    none while they search. `relaxed` solves the relaxation of the rows as they are."""
    for _ in range(ROUNDS if task.violated else 0):
        x = relaxed()
        cuts = task.violated(x) if task.violated and x is not None else []
        if not cuts:
            break
        for cut in cuts:
            task.rows.clause(*cut)
