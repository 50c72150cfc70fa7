"""What an engine is, and how it is found: the module of its name.

Engines run in processes of their own, `python -m optpipe_solver.engines`. One process runs one engine after the other,
so that what the first has loaded is there for the next. But highspy and ortools cannot live in one process, since their
bundled HiGHS symbols clash. So an engine's module loads neither before `run`, and what loads highspy runs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

from optpipe.dispatch import descents
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate import jit
from optpipe.model.problem import Problem
from optpipe.process.child import WAITS
from optpipe.process.protocol import End, Frame, Request, requests, write_frame
from optpipe_solver.methods import ENGINES


class Engine(Protocol):
    """A module with a search that improves schedules or proves bounds, such as CP-SAT on windows of a schedule."""

    MOST_THREADS: int | None  # that it can use; None: as many as it is given
    OPEN_ENDED: bool  # whether it makes no plan for its time, so that it may be stopped or go on at any moment
    ALONE: bool  # whether no other engine can run in its process, before it or after

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


def small_problem() -> Problem:
    """Two devices whose activations can leave."""
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms")
    stage = {**dict.fromkeys(times, 1.0), "activation_bytes": 2, "saved_for_weight_bytes": 1, "offload_bytes": 2}
    stages, devices = [{"device": d, **stage} for d in range(2)], [{"activation_budget_bytes": 4}] * 2
    return Problem.from_dict({"microbatches": 4, "devices": devices, "stages": stages})


def load(name: str) -> Engine:
    """Import an engine, one of `methods.ENGINES`."""
    engine: Engine = import_module(f"optpipe_solver.{name}")
    return engine


def waits_for_compiler(name: str) -> bool:
    """Whether an engine compiles before it searches, which takes some seconds the first time on a machine."""
    return jit.waits_for_compiler(LOOPS.get(name, ()))


def main() -> None:
    """Run the engine that each request's `method` names, to an `End` frame, until standard input closes."""
    asked = requests(Request)
    if WAITS in sys.argv and not waits_for_compiler("dispatch"):
        descents.compile_descents(Simulator(small_problem()))  # loads numba and what was compiled
    for request in asked:
        if request.method not in ENGINES:
            sys.exit(f"method = {request.method!r}: the engines are {', '.join(ENGINES)}")
        write_frame(End(spent_s=load(request.method).run(request, write_frame)))


if __name__ == "__main__":
    main()
