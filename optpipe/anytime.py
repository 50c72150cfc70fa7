"""`improve` and `solve`: better and better schedules from a solver process, each verified before the caller sees it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Self, Unpack

from optpipe.errors import FrameError, InputError, SolverError
from optpipe.evaluate.jitter import percentile_ms
from optpipe.evaluate.objective import NEVER, Objective, gap, length_ms, reaches
from optpipe.known import CacheUse, ScheduleCache, better_start
from optpipe.model.problem import Problem
from optpipe.options import SearchOptions, SolveArguments, SolveOptions
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Infeasible, Note, Programs, Refused, Request
from optpipe.schedule import Found, Schedule, Status
from optpipe.show.page import still

GRACE_S = 3.0  # a solver that has not ended this long after its time limit is killed
MOST_NOTES = 200  # further notes of a solver are dropped
SOLVER = "optpipe_solver"
NOTHING_YET = "no schedule was found before the search ended"
SILENT = "the solver had told nothing when it was stopped after {:.1f} s: it had too little time to start"


@dataclass(frozen=True)
class Step:
    """One incumbent of a search: after how many seconds it came, its method, its value, and the best bound by then."""

    time_s: float
    method: str
    value_ms: float
    lower_bound_ms: float | None


@dataclass(frozen=True)
class Result:
    """What is known at some moment of a search: the best schedule and the best lower bound so far. Times in ms.

    Attributes
    ----------
    status
        What is known: `optimal` (proven), `feasible`, `infeasible` (no schedule fits) or `unknown`.
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
        What there was to say on the way, such as that an engine crashed.
    reports
        Notes on how the method asked for ended; nothing is wrong.
    percentile_ms
        With jitter: the objective's 95th percentile (`optpipe.evaluate.jitter`).
    history
        The incumbents so far, this one last.
    rejected
        Frames of the solver that were no valid schedule, no better than one before, or unreadable.
    failure
        How the solver's process failed; also the last of the notes.
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
    percentile_ms: float | None = None
    history: tuple[Step, ...] = ()
    rejected: int = 0
    failure: str | None = None

    @classmethod
    def from_schedule(
        cls, schedule: Schedule, options: SearchOptions, lower_bound_ms: float | None = None, method: str = ""
    ) -> Self:
        """What a valid schedule and a bound are to a search with these options."""
        objective, jitter = options.objective, options.jitter
        percentile = percentile_ms(schedule, jitter, objective, options.seed) if jitter else None
        method = method or schedule.method
        found = cls("feasible", schedule, objective, lower_bound_ms, method, percentile_ms=percentile)
        return replace(found, status=found.proven_status)

    @property
    def makespan_ms(self) -> float | None:
        return self.schedule.makespan_ms if self.schedule else None

    @property
    def span_ms(self) -> float | None:
        return self.schedule.span_ms if self.schedule else None

    @property
    def objective_ms(self) -> float | None:
        return length_ms(self.schedule, self.objective) if self.schedule else None

    @property
    def value_ms(self) -> float | None:
        """What the search minimizes: the percentile if there is jitter, else the objective."""
        return self.objective_ms if self.percentile_ms is None else self.percentile_ms

    @property
    def gap(self) -> float | None:
        """How much shorter a schedule could at most be, as a share of this one; 0 is proven optimal.

        It speaks of nominal times, also where there is jitter.
        """
        return gap(self.objective_ms, self.lower_bound_ms)

    @property
    def proven_status(self) -> Status:
        """`optimal` where the bound proves it; a bound on nominal times says nothing about a percentile."""
        return "optimal" if self.gap == 0 and self.percentile_ms is None else self.status

    @property
    def found_status(self) -> Found:
        """The status of the schedule, in a file or a cache."""
        return "optimal" if self.status == "optimal" else "feasible"

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>{still(self.schedule) if self.schedule else ''}"

    def __str__(self) -> str:
        """One line, such as `570 ms by lns, bubble 21.4%, gap 7.9% to the lower bound 525 ms`."""
        if self.schedule is None:
            return f"infeasible: {self.reason}" if self.status == "infeasible" else self.reason or NOTHING_YET
        placed = f" with {self.schedule.placement}" if self.schedule.placement else ""
        line = f"{self.objective_ms:.6g} ms by {self.method}{placed}"
        if self.percentile_ms is not None:
            line += f", with noise within {self.percentile_ms:.6g} ms in 95% of all iterations"
        line += f", bubble {self.schedule.timeline.bubble:.1%}"
        if self.status == "optimal":
            return f"{line}, proven optimal"
        if self.gap is None:
            return line
        return f"{line}, gap {self.gap:.1%} to the lower bound {self.lower_bound_ms:.6g} ms"


def merged(best: Result, new: Result) -> Result:
    """The better schedule of two results for one problem, with the better bound; everything else is the new one's.

    A bound above the schedule's length is wrong and is dropped.
    """
    kept = min((best, new), key=lambda result: NEVER if result.value_ms is None else result.value_ms)
    if kept.schedule is None:
        kept = new
    longest = length_ms(kept.schedule, kept.objective)
    told = (result.lower_bound_ms for result in (best, new))
    bounds = [bound for bound in told if bound is not None and reaches(bound, longest)]
    result = replace(
        new,
        schedule=kept.schedule,
        method=kept.method,
        percentile_ms=kept.percentile_ms,
        lower_bound_ms=max(bounds, default=None),
    )
    if result.schedule is None:
        return result
    return replace(result, status=replace(result, status="feasible").proven_status, reason=None)


@dataclass
class _Known:
    """What a search knows by now."""

    result: Result


class Search:
    """An iterator of better and better results; the last one is final. `cancel()` from any thread ends it early."""

    def __init__(
        self, request: Request, admit: Callable[[int], None] | None = None, used: CacheUse | None = None
    ) -> None:
        self._used = used or CacheUse(None)
        self._child = Child(SOLVER, request, admit)
        self._deadline = threading.Timer(request.time_limit_s + GRACE_S, self._child.stop)
        self._deadline.daemon = True
        self._deadline.start()
        self._known = _Known(Result("unknown", objective=request.objective, reason=NOTHING_YET))
        self._results: Iterator[Result] = _results(request, self._child, self._deadline, self._known)
        # Not __del__: in a reference cycle the child's files would be finalized before it.
        weakref.finalize(self, _abandon, self._deadline, self._child)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        result = next(self._results)
        if result.schedule is not None:
            self._used.keep(result.schedule, result.found_status, result.lower_bound_ms, result.objective)
        return replace(result, notes=(*result.notes, self._used.note)) if self._used.note else result

    @property
    def mark(self) -> str:
        """The mark of all its processes (`optpipe.process.process_tree`)."""
        return self._child.mark

    @property
    def known(self) -> Result:
        """What is known by now. Unlike the results that are iterated over, it has every new bound at once."""
        return self._known.result

    def cancel(self) -> None:
        """Ends the search; the results end with the best so far."""
        self._child.stop()


class _Answered(Search):
    """A search that is over when it begins: what is known is proven."""

    def __init__(self, result: Result) -> None:
        self._known, self._used, self._results = _Known(result), CacheUse(None), iter((result,))

    @property
    def mark(self) -> str:
        return ""

    def cancel(self) -> None:
        pass


def _abandon(deadline: threading.Timer, child: Child) -> None:
    deadline.cancel()
    child.close()


def _results(request: Request, child: Child, deadline: threading.Timer, known: _Known) -> Generator[Result, None, None]:
    began = time.monotonic()
    best = shown = known.result
    said_nothing, ongoing, failure = True, None, None
    try:
        for frame in child.frames():
            if isinstance(frame, Refused):
                raise InputError(frame.reason)
            said_nothing = said_nothing and isinstance(frame, End)
            if isinstance(frame, Note) and frame.method:
                ongoing = frame if frame.ongoing else None
            now = replace(_after(best, frame, request), time_s=time.monotonic() - began)
            best = known.result = now if now.schedule is best.schedule else _with_step(now)
            news = (best.schedule, best.status) != (shown.schedule, shown.status)
            if isinstance(frame, Incumbent | Infeasible) and news:
                yield best
                shown = best
            if request.gap and best.gap is not None and best.gap <= request.gap:
                break
    except SolverError as error:
        failure = error
    finally:
        deadline.cancel()
        child.stop()
    passed_s = time.monotonic() - began
    if ongoing:
        best = _with_note(best, ongoing.stopped(passed_s))
    if failure:
        rejected = best.rejected + isinstance(failure, FrameError)
        best = replace(best, notes=(*best.notes, str(failure)), failure=str(failure), rejected=rejected)
    elif said_nothing and passed_s >= request.time_limit_s:  # else somebody cancelled it
        best = _with_note(best, Note(text=SILENT.format(passed_s)))
    if best.status == "unknown" and best.notes:
        best = replace(best, reason=best.notes[-1])
    yield replace(best, time_s=passed_s)


def _after(best: Result, frame: Frame, request: Request) -> Result:
    """What is known after one more frame."""
    if isinstance(frame, Incumbent):
        return _with_incumbent(best, frame, request)
    if isinstance(frame, Bound) and (best.lower_bound_ms is None or frame.lower_bound_ms > best.lower_bound_ms):
        best = replace(best, lower_bound_ms=frame.lower_bound_ms)
        return replace(best, status=best.proven_status)
    if isinstance(frame, Infeasible) and best.schedule is None:
        return replace(best, status="infeasible", reason=frame.reason)
    return _with_note(best, frame) if isinstance(frame, Note) else best


def _with_note(best: Result, note: Note) -> Result:
    if note.ongoing or len(best.notes) >= MOST_NOTES:
        return best
    reports = (*best.reports, note.text) if note.method else best.reports
    return replace(best, notes=(*best.notes, note.text), reports=reports)


def _with_incumbent(best: Result, frame: Incumbent, request: Request) -> Result:
    """Takes an incumbent that is valid on the exact problem and better: here it leaves the solver's process."""
    try:
        schedule = frame.schedule.schedule(request.problem, frame.method)
        wrong = schedule.compiled.complaints  # on the problem that was asked about, or its placement
        if schedule.placement and request.placements == "keep":
            wrong = [f"{schedule.placement}: the stages were to be kept"]
    except InputError as error:
        wrong = [str(error)]
    if wrong:
        best = replace(best, rejected=best.rejected + 1)
        return _with_note(best, Note(text=f"a schedule of {frame.method} was rejected: {wrong[0]}"))
    found = Result.from_schedule(schedule, request, best.lower_bound_ms, frame.method)
    if best.value_ms is not None and found.value_ms is not None and found.value_ms >= best.value_ms:
        return replace(best, rejected=best.rejected + 1)
    return replace(found, notes=best.notes, reports=best.reports, history=best.history, rejected=best.rejected)


def _with_step(result: Result) -> Result:
    assert result.value_ms is not None, "a schedule has a value"
    return replace(
        result, history=(*result.history, Step(result.time_s, result.method, result.value_ms, result.lower_bound_ms))
    )


def improve(
    problem: Problem,
    *,
    warm_start: Schedule | None = None,
    cache: ScheduleCache | None = None,
    admit: Callable[[int], None] | None = None,
    **options: Unpack[SolveArguments],
) -> Search:
    """Searches in the background: the first schedule comes within moments from a heuristic, better ones from engines.

    Parameters
    ----------
    problem
        What is to be scheduled.
    warm_start
        Any schedule to start from, also one for costs that have since changed.
    cache
        Solved schedules, such as `optpipe_cache.Cache(path)`. The search starts from what is known there if that is
        shorter, and every better schedule is kept there. A proven schedule of this problem is the answer. A heuristic
        or a published schedule that is asked for is made anew.
    admit
        Called with the id of the solver's process before it is asked anything, to set limits of the caller's own.
    options
        `optpipe.options.SolveOptions`, such as `method="cpsat", time_limit_s=20`; docs/commands.md has a table.

    Returns
    -------
    Search
        An iterator of `Result`s; the last one is final.

    Raises
    ------
    InputError
        If an option is unknown or out of range. An unknown method is reported when the first result is asked for.
    """
    return _searching("improve", problem, warm_start, options, cache, admit)


def _searching(
    what: str,
    problem: Problem,
    warm_start: Schedule | None,
    options: SolveArguments,
    cache: ScheduleCache | None = None,
    admit: Callable[[int], None] | None = None,
) -> Search:
    """`improve`; a wrong argument is one of `what`."""
    if warm_start is not None and not isinstance(warm_start, Schedule):
        raise InputError(
            f"{what}: warm_start is of type {type(warm_start).__name__}: a Schedule was expected "
            "(Schedule.load reads a file)"
        )
    asked, used = SolveOptions.from_arguments(what, options), CacheUse(cache)
    hit = used.hit(problem, asked.objective) if asked.starts_from_known else None
    if hit:
        if hit.status == "optimal" and asked.answered_by_optimum:
            return _Answered(
                Result.from_schedule(hit.schedule, asked, hit.lower_bound_ms, f"{hit.schedule.method} (cached)")
            )
        warm_start = better_start(problem, warm_start, hit, asked.objective)
    chosen = asked.arguments()
    chosen["threads"] = chosen["threads"] or os.cpu_count() or 1
    start = Programs.from_schedule(warm_start) if warm_start is not None else None
    return Search(Request.model_validate({"problem": problem, "warm_start": start, **chosen}), admit, used)


def solve(
    problem: Problem,
    *,
    warm_start: Schedule | None = None,
    cache: ScheduleCache | None = None,
    **options: Unpack[SolveArguments],
) -> Result:
    """The best schedule within the time limit; arguments as for `improve`.

    A problem that no schedule fits ends with status `infeasible` and the reason.
    """
    *_, last = _searching("solve", problem, warm_start, options, cache)
    return last
