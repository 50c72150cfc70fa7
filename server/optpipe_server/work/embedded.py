"""`EmbeddedWorker`: solves the jobs of a service that is one process, whose table of jobs is the queue."""

from __future__ import annotations

import threading
import time

from optpipe_server.work.rounds import Rounds
from optpipe_server.work.solve import Solve
from optpipe_server.work.solves import Solves

LOOK_S = 0.5  # between two looks for a job that waits, unless `nudge` is called


class EmbeddedWorker:
    """Solves up to `solves.most` jobs at a time: the highest priority first, then the oldest. Jobs that ran when the
    former process ended are among them."""

    def __init__(self, solves: Solves) -> None:
        self.solves = solves
        self._claims = Rounds("claims", "jobs cannot be claimed", LOOK_S, self._claim)
        self.nudge, self.health = self._claims.nudge, solves.health

    def start(self) -> None:
        self.solves.start()
        self._claims.start()

    def stop(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._claims.stop(timeout_s)
        self.solves.stop(until)

    def _claim(self) -> None:
        while len(running := self.solves.running()) < self.solves.most and not self._claims.stopping.is_set():
            job_id = self.solves.searches.first_open([solve.claim.job_id for solve in running])
            if job_id is None:
                return
            solve = self.solves.begin(job_id, self._claims.stopping.is_set)
            if solve is None:
                continue
            try:
                threading.Thread(target=self._run, args=(solve,), name=f"solve {job_id}", daemon=True).start()
            except RuntimeError:  # the system has no more threads now
                solve.end("stopping")
                self.solves.run(solve)
                raise

    def _run(self, solve: Solve) -> None:
        try:
            self.solves.run(solve)
        finally:
            self.nudge()
