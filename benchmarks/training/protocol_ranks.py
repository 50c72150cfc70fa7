"""The paper's protocol (OptPipe, sections 4.3 and 5), one process on each rank: profile, train by PipeOffload, solve
the MILP beside the training, and swap in every better schedule that its solver's callbacks tell of.

Afterwards, with the machine quiet, the first and the best schedule alternate, as in the demo, whose model is trained.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optpipe import Result, Schedule, improve, solve
from optpipe_runtime.demo.on_ranks import load, measure_on_ranks
from optpipe_runtime.demo.train import DemoResult, DemoSettings, Training, alternate
from optpipe_runtime.lowering.prepare import one_at_a_time

FIRST = "po-f"  # "for these estimation runs, we adopt PipeOffload due to its minimal memory footprint"


@dataclass(frozen=True)
class ProtocolSettings:
    """The training, how long the MILP is solved beside it, in s, and by which backend on how many threads."""

    milp_s: float = 300.0
    solver: str = "auto"
    threads: int = 1
    training: DemoSettings = field(default_factory=DemoSettings)


@dataclass(frozen=True)
class Offered:
    """A schedule of the search: after how many seconds it came, by which method, how long a step is predicted to take,
    and before which step it was offered."""

    time_s: float
    method: str
    predicted_ms: float
    step: int


class _Search:
    """The MILP's search, on rank 0: its incumbents as they come."""

    def __init__(self, settings: ProtocolSettings, training: Training) -> None:
        assert training.pipe.problem is not None
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._training = training
        self.offered: list[Offered] = []
        assert training.pipe.schedule is not None
        self._shortest_ms = training.pipe.schedule.makespan_ms
        self.last: Result | None = None
        search = improve(
            training.pipe.problem,
            method="milp",
            solver=settings.solver,
            time_limit_s=settings.milp_s,
            threads=settings.threads,
        )
        self._thread = threading.Thread(target=self._follow, args=(search,), daemon=True)
        self._thread.start()

    def _follow(self, search: Iterator[Result]) -> None:
        for result in search:
            self._results.put(result)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def offer(self) -> None:
        """Offers what has come since the last call."""
        while not self._results.empty():
            self.last = result = self._results.get()
            if result.schedule and result.schedule.makespan_ms < self._shortest_ms:
                self._shortest_ms = result.schedule.makespan_ms
                self._training.pipe.offer(result.schedule)
                step = len(self._training.steps)
                self.offered.append(Offered(result.time_s, result.method, result.schedule.makespan_ms, step))


def run(settings: ProtocolSettings) -> dict[str, Any]:
    """Collective: the whole protocol; returns what rank 0 has measured."""
    training = Training(settings.training)
    search = None
    with training.pipe:
        problem = training.profile()
        start: Schedule | None = None
        if training.rank == 0:
            start = solve(problem, method=FIRST, time_limit_s=settings.training.first_s).schedule
            start = start or one_at_a_time(problem)
        training.pipe.load(start)
        training.step(live=False)
        began = time.monotonic()
        if training.rank == 0:
            search = _Search(settings, training)
        while training.agreed(search is None or search.running):
            training.step(live=True)
            if search:
                search.offer()
        beside_s = time.monotonic() - began
        if search:
            search.offer()
        training.step(live=False)
        alternate(training)
    measured = DemoResult.from_training(training, problem)
    last = search.last if search else None
    return {
        "milp_s": beside_s,
        "offered": [asdict(offered) for offered in search.offered] if search else [],
        "answer": str(last) if last else None,
        "notes": list(last.notes) if last else [],
        "lower_bound_ms": last.lower_bound_ms if last else None,
        "training": asdict(measured),
    }


def main() -> None:
    """`python -m benchmarks.training.protocol_ranks SETTINGS ANSWER`, under torchrun."""
    settings = load(ProtocolSettings, Path(sys.argv[1]))
    measure_on_ranks(lambda: run(settings), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
