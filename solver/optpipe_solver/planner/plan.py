"""`Plan`: what the planner answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question
from optpipe_solver.planner.today import Running


class Counts(NamedTuple):
    """Candidates that have no room for one micro-batch or for any schedule of the stack; those that have no schedule
    because of their bounds, or because time was up; and those with a schedule that fits."""

    too_large: int
    ruled_out: int
    left_open: int
    scheduled: int


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes
    ----------
    ranked
        All candidates. First the one to run: the shortest, or one that is longer by less than `tuning.PLAN_TIE` and has
        less context parallelism. Then the shortest iteration first, then the lowest bounds.
    searched
        How many of them were searched.
    gap
        Candidates that could be shorter by no more than this share were ruled out.
    notes
        Why searches of candidates failed.
    optpipe_ms
        Where Megatron's own offload is the best: the iteration of OptPipe's schedule of the same division and memory.
    """

    question: Question
    ranked: tuple[Candidate, ...]
    searched: int
    gap: float
    time_s: float
    notes: tuple[str, ...]
    today: Running | None = None
    optpipe_ms: float | None = None

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def shortest(self) -> Candidate:
        return min(self.ranked, key=lambda candidate: candidate.iteration_ms)

    @property
    def counts(self) -> Counts:
        """How many candidates came to what; each is counted once."""
        bounds = [c.bound_ms for c in self.ranked if c.method is None]
        too_large = sum(ms >= NO_SCHEDULE_MS for ms in bounds)
        left_open = sum(shorter(ms, self.shortest.iteration_ms * (1 - self.gap)) for ms in bounds)
        ruled_out = len(bounds) - too_large - left_open
        return Counts(too_large, ruled_out, left_open, len(self.ranked) - len(bounds))

    @property
    def may_be_shorter(self) -> list[float]:
        """By which shares other candidates may still be shorter than the best, as far as their bounds allow."""
        best_ms = self.best.iteration_ms
        return [1 - c.bound_ms / best_ms for c in self.ranked if c is not self.best and shorter(c.bound_ms, best_ms)]

    @property
    def lower_bound_ms(self) -> float:
        """No candidate has a shorter iteration."""
        return min(min(c.bound_ms for c in self.ranked), self.best.iteration_ms)

    @property
    def other_divisions(self) -> list[Candidate]:
        """The best candidate of each other division that fits: those with an iteration first, then by their bounds."""
        best: dict[tuple[int, ...], Candidate] = {}
        for candidate in self.ranked:
            if candidate.bound_ms < NO_SCHEDULE_MS and candidate.division != self.best.division:
                best.setdefault(candidate.division, candidate)
        return list(best.values())

    @property
    def frontier(self) -> list[tuple[int, float, Candidate, str]]:
        """Of all schedules seen those that none beats in memory and time: bytes of a GPU, ms, candidate and method."""
        seen = [(held, ms, n, m) for n, c in enumerate(self.ranked) for m, (ms, held) in c.lengths.items()]
        best: list[tuple[int, float, Candidate, str]] = []
        for held, ms, n, method in sorted(seen):
            if not best or shorter(ms, best[-1][1]):
                best.append((held, ms, self.ranked[n], method))
        return best
