"""What a plan search answers: a `Plan`, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.candidates import Question
from optpipe_solver.planner.today import Running

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes
    ----------
    ranked
        All candidates, the shortest iteration first, then the lowest bounds.
    too_large
        How many of them have no room for one micro-batch, or for any schedule of the stack.
    looked_at
        How many were given schedules, whether they fit or not.
    solved
        How many were searched.
    gap
        Candidates that could be shorter by no more than this share were ruled out.
    time_s
        How long the search took.
    notes
        Why searches of candidates failed.
    today
        What runs today, if that was told.
    """

    question: Question
    ranked: tuple[Candidate, ...]
    too_large: int
    looked_at: int
    solved: int
    gap: float
    time_s: float
    notes: tuple[str, ...]
    today: Running | None = None

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def ruled_out(self) -> int:
        """How many candidates were left without a schedule because of their bounds."""
        return sum(c.schedule is None and self._limit_ms <= c.bound_ms < NO_SCHEDULE_MS for c in self.ranked)

    @property
    def left_open(self) -> int:
        """How many other candidates could still be shorter by more than the gap: there was no time for them."""
        return sum(c is not self.best and c.bound_ms < self._limit_ms for c in self.ranked)

    @property
    def _limit_ms(self) -> float:
        return self.best.iteration_ms * (1 - self.gap)

    @property
    def lower_bound_ms(self) -> float:
        """No candidate has a shorter iteration."""
        return min(min(c.bound_ms for c in self.ranked), self.best.iteration_ms)

    @property
    def other_divisions(self) -> list[Candidate]:
        """The best candidate of each other division that fits: those with a schedule first, then by their bounds."""
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


def why_none(question: Question, candidates: Sequence[Candidate], time_limit_s: float) -> str:
    """Why there is no schedule: too little time, or which candidate misses by least and what it needs."""
    left = sum(candidate.bound_ms < NO_SCHEDULE_MS for candidate in candidates)
    if left:
        return (
            f"time_limit_s = {time_limit_s:g}: no schedule was found by then and {left} candidates "
            "are left; a longer time would be right"
        )
    near, needed = _nearest(candidates)
    who, has = f"gpus = {question.gpus}: no division fits: with {near},", question.gpu.memory_bytes
    limit = f"; {question.limit}" if question.limit else ""
    if needed <= has:
        return f"{who} one micro-batch fits, but no schedule that {question.stack} has{limit}"
    return (
        f"{who} a GPU needs {needed / GB:.1f} GB for one micro-batch at a time, {near.state_bytes / GB:.1f} of it "
        f"without any activation, and has {has / GB:.1f}; more GPUs, larger ones or a smaller model would "
        f"fit{limit}"
    )


def _nearest(candidates: Sequence[Candidate]) -> tuple[Candidate, int]:
    """The candidate whose fullest GPU needs least, and how many bytes that are."""
    nearest, least = candidates[0], (NO_SCHEDULE_MS, 0)
    for candidate in sorted(candidates, key=lambda candidate: candidate.state_bytes):
        if candidate.state_bytes >= least[0]:
            break
        needs = candidate.needed_bytes, candidate.estimate.parallelism.stages
        if needs < least:
            nearest, least = candidate, needs
    return nearest, int(least[0])
