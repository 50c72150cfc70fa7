"""`improve` and `solve`: better and better schedules from a solver process, each verified before the caller sees it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Unpack

from optpipe import solvers
from optpipe.errors import FrameError, InputError, SolverError
from optpipe.known import ScheduleCache, SearchCache, better_start
from optpipe.model.problem import Problem
from optpipe.options import SolveArguments, SolveOptions
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Infeasible, Note, Programs, Refused, Request
from optpipe.results import NOTHING_YET, Result, Step
from optpipe.schedule import Schedule

GRACE_S = 3.0  # a solver that has not ended this long after its time limit is killed
MOST_NOTES = 200  # further notes of a solver are dropped
SILENT = "the solver had told nothing when it was stopped after {:.1f} s: it had too little time to start"


@dataclass
class _Known:
    """What a search knows by now."""

    result: Result


class Search:
    """An iterator of better and better results; the last one is final. `cancel()` from any thread ends it early."""

    def __init__(self, request: Request, admit: Callable[[int], None] | None, used: SearchCache) -> None:
        self._used = used
        self._child = Child(solvers.installed().SEARCH, request, admit)
        began = time.monotonic()
        self._deadline = threading.Timer(request.time_limit_s + GRACE_S, self._child.stop)
        self._deadline.daemon = True
        self._deadline.start()
        begun = Result("unknown", objective=request.objective, reason=NOTHING_YET, placements=request.placements)
        self._known = _Known(begun)
        self._results: Iterator[Result] = _results(request, self._child, self._deadline, self._known, began)
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
        self._known, self._used, self._results = _Known(result), SearchCache(None), iter((result,))

    @property
    def mark(self) -> str:
        return ""

    def cancel(self) -> None:
        pass


def _abandon(deadline: threading.Timer, child: Child) -> None:
    deadline.cancel()
    child.close()


def _results(
    request: Request, child: Child, deadline: threading.Timer, known: _Known, began: float
) -> Generator[Result, None, None]:
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
    result = Result.from_schedule(schedule, request, best.lower_bound_ms, frame.method)
    if best.value_ms is not None and result.value_ms is not None and result.value_ms >= best.value_ms:
        return replace(best, rejected=best.rejected + 1)
    return replace(result, notes=best.notes, reports=best.reports, history=best.history, rejected=best.rejected)


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
    cache: ScheduleCache | None,
    admit: Callable[[int], None] | None = None,
) -> Search:
    """`improve`; a wrong argument is one of `what`."""
    if warm_start is not None and not isinstance(warm_start, Schedule):
        raise InputError(
            f"{what}: warm_start is of type {type(warm_start).__name__}: a Schedule was expected "
            "(Schedule.load reads a file)"
        )
    asked, used = SolveOptions.from_arguments(what, options), SearchCache(cache)
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
