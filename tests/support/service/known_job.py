"""A plain Python model of a job in the service's database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optpipe.model.problem import Problem
from optpipe.results import Result
from optpipe_server.database.jobs import options_of
from optpipe_server.database.refusals import CANCELLED
from optpipe_server.database.searches import MOST_LOSSES, Claim
from optpipe_server.database.tables import OPEN


@dataclass
class Known:
    """A job as it should be."""

    key_name: str
    problem: Problem
    priority: int
    number: int
    time_limit_s: float
    state: str = "queued"
    key: str | None = None
    reason: str | None = None
    version: int = 1  # of the problem
    cancel: bool = False
    incumbents: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, length
    status: str = "unknown"
    bound: float | None = None
    bounds: list[tuple[int, float]] = field(default_factory=list)  # version of the problem, bound
    attempt: int = 0
    worker: str | None = None
    spent_s: float = 0.0
    crashes: int = 0
    losses: int = 0
    adopted: dict[int, int] = field(default_factory=dict)
    changes: int = 0

    @property
    def best(self) -> float | None:
        last = self.incumbents[-1:]
        return last[0][1] if last and last[0][0] == self.version else None

    def learn(self, result: Result) -> None:
        self.status = result.status
        if result.lower_bound_ms is not None:
            self.learn_bound(result.lower_bound_ms)

    def learn_bound(self, told: float) -> None:
        if self.bound is None or told > self.bound:
            self.bound = told
            self.bounds.append((self.version, told))

    def add(self, result: Result) -> None:
        assert result.makespan_ms is not None
        if self.best is None or result.makespan_ms < self.best:
            self.incumbents.append((self.version, result.makespan_ms))
            self.learn(result)
            self.changes += 1

    def end(self, state: str, reason: str | None) -> None:
        self.state, self.reason, self.worker = state, reason, None
        self.changes += 1

    def wait(self) -> None:
        self.state, self.worker = "queued", None
        self.changes += 1

    def lose(self) -> None:
        """Its worker is gone, as another one finds."""
        self.losses += 1
        if self.cancel:
            self.end("cancelled", CANCELLED)
        elif self.losses <= MOST_LOSSES:
            self.changes += 1
        else:
            self.end("done" if self.best is not None else "failed", f"its worker was lost {self.losses} times")

    def is_that_of(self, claim: Claim) -> None:
        assert (claim.attempt, claim.problem, claim.problem_version) == (self.attempt, self.problem, self.version)
        assert (claim.options.time_limit_s, claim.spent_s, claim.lower_bound_ms) == (
            self.time_limit_s,
            self.spent_s,
            self.bound,
        )
        assert (claim.best is None) == (not self.incumbents)
        assert claim.best_version == (self.incumbents[-1][0] if self.incumbents else 0)
        if claim.best is not None and self.best is not None:
            assert claim.best.makespan_ms == self.best

    def is_as(self, job: Any, incumbents: Sequence[Any], bounds: Sequence[Any]) -> None:
        """The rows say the same."""
        assert (job.key_name, job.idempotency_key) == (self.key_name, self.key)
        assert (job.state, job.reason, job.status, job.lower_bound_ms) == (
            self.state,
            self.reason,
            self.status,
            self.bound,
        )
        assert (job.problem_version, job.problem_sha256) == (self.version, self.problem.sha256)
        assert (job.attempt, job.worker, job.crashes, job.losses) == (
            self.attempt,
            self.worker,
            self.crashes,
            self.losses,
        )
        assert (job.spent_s, job.version) == (self.spent_s, self.changes + 1)
        assert options_of(job).time_limit_s == self.time_limit_s
        assert (job.ended_at is None) == (self.state in OPEN)
        assert [(each.problem_version, each.makespan_ms) for each in incumbents] == self.incumbents
        assert job.value_ms == self.best
        assert [(each.problem_version, each.lower_bound_ms) for each in bounds] == self.bounds
        assert [each.seq for each in incumbents] == [*range(1, job.last_seq + 1)]
        assert {each.seq: each.step for each in incumbents if each.step is not None} == self.adopted
