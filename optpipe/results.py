"""`Result`: the best schedule and bound at some moment of a search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Self

from optpipe import solvers
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, gap, length_ms, reaches, shorter
from optpipe.model.placement import Placement
from optpipe.options import Placements, SearchOptions
from optpipe.process.protocol import Remedy
from optpipe.schedule import Found, Schedule, Status

HOLDS_FOR = {"keep": "the stages as given", "all": "all stages that were searched"}
NOTHING_YET = "no schedule was found before the search ended"
GONE = "its training is gone"  # why a service cancels a job whose lease is over


@dataclass(frozen=True)
class Improvement:
    """One incumbent of a search: after how many seconds it came, its method, its value, and the best bound by then."""

    time_s: float
    method: str
    value_ms: float
    lower_bound_ms: float | None


@dataclass(frozen=True)
class Result:
    """The best schedule and the best lower bound at some moment of a search. Times in ms.

    Attributes
    ----------
    status
        `optimal` (proven), `feasible`, `infeasible` (no schedule fits) or `unknown`.
    schedule
        The best schedule, None if there is none.
    objective
        What the search minimizes, makespan or span.
    lower_bound_ms
        No schedule of the problem is shorter.
    method
        What found the schedule.
    time_s
        Since the search began.
    reason
        Why there is no schedule.
    notes
        Of the search, such as that an engine crashed.
    reports
        Notes on how the method asked for ended; nothing is wrong.
    history
        The incumbents so far, this one last.
    rejected
        Frames of the solver that were no valid schedule, no better than one before, or unreadable.
    failure
        How the solver's process failed; also the last of the notes.
    placements
        The stages that the search could choose, and for which its bound holds: `keep`, the problem's own, or `all`.
    other_stages
        Where the stages were kept: the shortest published schedule that fits on other ones; of a search, its last
        result has it.
    remedies
        Where nothing fits: changes with which something does.
    """

    status: Status
    schedule: Schedule | None = None
    objective: Objective = "makespan"
    lower_bound_ms: float | None = None
    method: str = ""
    time_s: float = 0.0
    reason: str | None = None
    notes: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    history: tuple[Improvement, ...] = ()
    rejected: int = 0
    failure: str | None = None
    placements: Placements = "keep"
    other_stages: Schedule | None = None
    remedies: tuple[Remedy, ...] = ()

    @classmethod
    def from_schedule(
        cls, schedule: Schedule, options: SearchOptions, lower_bound_ms: float | None = None, method: str = ""
    ) -> Self:
        """What a valid schedule and a bound are to a search with these options."""
        result = cls("feasible", schedule, options.objective, lower_bound_ms, method or schedule.method)
        return replace(result, status=result.proven_status, placements=options.placements_of(schedule.problem))

    @property
    def makespan_ms(self) -> float | None:
        return self.schedule.makespan_ms if self.schedule else None

    @property
    def span_ms(self) -> float | None:
        return self.schedule.span_ms if self.schedule else None

    @property
    def value_ms(self) -> float | None:
        """What the search minimizes: the objective."""
        return length_ms(self.schedule, self.objective) if self.schedule else None

    @property
    def bubble(self) -> float | None:
        """The share of the time in which devices compute nothing."""
        return self.schedule.timeline.bubble if self.schedule else None

    @property
    def gap(self) -> float | None:
        """How much shorter a schedule could at most be, as a share of this one; 0 is proven optimal."""
        return gap(self.value_ms, self.lower_bound_ms)

    @property
    def proven_status(self) -> Status:
        """`optimal` where the bound proves it."""
        return "optimal" if self.gap == 0 else self.status

    @property
    def found_status(self) -> Found:
        """The status of the schedule, in a file or a cache."""
        return "optimal" if self.status == "optimal" else "feasible"

    @property
    def advice(self) -> str | None:
        """One sentence on what was not searched: a published schedule on other stages, or what would fit."""
        if self.remedies and self.schedule is None:
            return f"what fits: {'; '.join(map(str, self.remedies))}"
        ms, best_ms = (length_ms(each, self.objective) for each in (self.other_stages, self.schedule))
        if self.other_stages is None or self.placements == "all":
            return None
        method, where = self.other_stages.method, "on other stages, which placements = all searches,"
        if not shorter(ms, best_ms):
            return f"{where} no published schedule that was tried is shorter ({method}: {ms:.6g} ms)"
        less = f", {1 - ms / best_ms:.1%} less" if self.schedule else ""
        return f"{where} {method} takes {ms:.6g} ms{less},{_with(self.other_stages.placement)}"

    @property
    def explanation(self) -> str | None:
        """Why there is no schedule, and `advice`, as one sentence."""
        return "; ".join(filter(None, (self.reason, self.advice))) or None

    def to_dict(self) -> dict[str, Any]:
        """The result's figures as JSON takes them; None for what is missing."""
        schedule = self.schedule
        certificate = schedule.compiled.certificate if schedule else None
        return {
            "status": self.status,
            "method": self.method or None,
            "makespan_ms": self.makespan_ms,
            "span_ms": self.span_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "bubble": self.bubble,
            "time_s": round(self.time_s, 3),
            "placements": self.placements,
            "placement": _as_json(schedule.placement) if schedule else None,
            "peak_bytes": [peak.bytes for peak in certificate.device] if certificate else None,
            "host_peak_bytes": [peak.bytes for peak in certificate.host] if certificate else None,
            "incumbents": [asdict(step) for step in self.history],
            "other_stages": self.other_stages
            and {
                "method": self.other_stages.method,
                "value_ms": length_ms(self.other_stages, self.objective),
                "placement": _as_json(self.other_stages.placement),
            },
            "remedies": [remedy.model_dump(mode="json") for remedy in self.remedies],
            "advice": self.advice,
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """One line for a notebook."""
        return f"<p>{escape(str(self))}</p>"

    def __str__(self) -> str:
        """One line: `570 ms by lns, bubble 21.4%, gap 7.9% to the lower bound 525 ms for the stages as given`."""
        if self.schedule is None:
            return f"infeasible: {self.explanation}" if self.status == "infeasible" else self.explanation or NOTHING_YET
        placed = _with(self.schedule.placement)
        line = f"{self.value_ms:.6g} ms by {self.method}{placed}, bubble {self.schedule.timeline.bubble:.1%}"
        if self.status == "optimal":
            line += f", proven optimal for {HOLDS_FOR[self.placements]}"
        elif self.gap is not None:
            bound = f"the lower bound {self.lower_bound_ms:.6g} ms for {HOLDS_FOR[self.placements]}"
            line += f", gap {self.gap:.1%} to {bound}"
        return f"{line}; {self.advice}" if self.advice else line


def _with(placement: Placement | None) -> str:
    count = f" (of {sum(placement.layers)}: embedding and head count)" if placement and placement.layers else ""
    return f" with {placement}{count}" if placement else ""


def is_better(ms: float, method: str, than_ms: float | None, than: str) -> bool:
    """Whether a schedule is shorter than that of another method, or as short and of one that searches on after a proof:
    who asks for such a method sees its own."""
    than_ms, exhaustive = NO_SCHEDULE_MS if than_ms is None else than_ms, solvers.installed().EXHAUSTIVE
    return shorter(ms, than_ms) or (method in exhaustive and than not in exhaustive and reaches(ms, than_ms))


def _as_json(placement: Placement | None) -> dict[str, Any] | None:
    return placement.model_dump(mode="json", exclude_none=True) if placement else None


def merged(best: Result, new: Result) -> Result:
    """The better schedule of two results for one problem, with the better bound; everything else is the new one's.

    A bound above the schedule's length is wrong and is dropped.
    """
    kept = min((best, new), key=lambda result: NO_SCHEDULE_MS if result.value_ms is None else result.value_ms)
    if kept.schedule is None:
        kept = new
    longest = length_ms(kept.schedule, kept.objective)
    both = best.lower_bound_ms, new.lower_bound_ms
    bounds = [bound for bound in both if bound is not None and reaches(bound, longest)]
    result = replace(new, schedule=kept.schedule, method=kept.method, lower_bound_ms=max(bounds, default=None))
    if result.schedule is None:
        return result
    return replace(result, status=replace(result, status="feasible").proven_status, reason=None)
