"""What an engine is, and how it is found: the module of its name.

Each engine runs in a process of its own, `python -m optpipe_solver.engines`: highspy and ortools cannot live in one
process, since their bundled HiGHS symbols clash. So an engine's module loads neither before `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

from optpipe.dispatch import descents
from optpipe.evaluate import jit
from optpipe.model.problem import Problem
from optpipe.process.protocol import End, Frame, Request, read_request, write_frame
from optpipe_solver.methods import ENGINES


class Engine(Protocol):
    """A module with a search that improves schedules or proves bounds, such as CP-SAT on windows of a schedule."""

    MOST_THREADS: int | None  # that it can use; None: as many as it is given
    OPEN_ENDED: bool  # whether it makes no plan for its time, so that it may be stopped or go on at any moment

    def unsupported(self, problem: Problem) -> str | None:
        """Say in one sentence why the engine cannot work on this problem; None if it can. Loads nothing heavy."""

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float | None:
        """Load what it takes, emit `Ready`, search until the request's time is up, and emit each better schedule and
        bound.

        Returns the seconds of its time limit that it used by its own count of work; None if it goes by the clock.
        """


LOOPS: dict[str, Sequence[str]] = {  # of engines that compile
    "dispatch": descents.LOOPS,
    "anneal": ("optpipe_solver.anneal.loops:anneal",),
    "relax": ("optpipe_solver.relax.one_stage_search:expand", "optpipe_solver.relax.several_stages:expand"),
}
COMPILING = "some engines are compiled first, once on a machine, and start some seconds later"


def load(name: str) -> Engine:
    """Import an engine, one of `methods.ENGINES`."""
    engine: Engine = import_module(f"optpipe_solver.{name}")
    return engine


def waits_for_compiler(name: str) -> bool:
    """Whether an engine compiles before it searches, which takes some seconds the first time on a machine."""
    return jit.waits_for_compiler(LOOPS.get(name, ()))


def main() -> None:
    """Run the engine that the request's `method` names. Ends with an `End` frame, or when standard input closes."""
    request = read_request(Request)
    if request.method not in ENGINES:
        sys.exit(f"method = {request.method!r}: the engines are {', '.join(ENGINES)}")
    write_frame(End(spent_s=load(request.method).run(request, write_frame)))


if __name__ == "__main__":
    main()
