"""`improve` and `solve`: better and better schedules from a solver process, each verified before the caller sees it.

Of a cache this module and the runtime know `ScheduleCache` only; `optpipe_cache.Cache` is one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, Unpack

from optpipe import solvers
from optpipe.errors import FrameError, InputError, OptPipeError, SolverError
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.formats.stacks import STACKS, restricted
from optpipe.model.problem import Problem
from optpipe.options import Placements, SolveArguments, SolveOptions
from optpipe.process.child import LOADING_S, Child
from optpipe.process.protocol import (
    Bound,
    End,
    Frame,
    Incumbent,
    Infeasible,
    Note,
    OtherStages,
    Programs,
    Ready,
    Refused,
    Remedies,
    Request,
)
from optpipe.results import NOTHING_YET, Improvement, Result, is_better
from optpipe.schedule import Found, Schedule, check

GRACE_S = 3.0  # a solver that has not ended this long after its time limit is killed
MOST_NOTES = 200  # further notes of a solver are dropped
Admit = Callable[[int], None]
SILENT = "the solver had reported nothing when it was stopped after {:.1f} s: it had too little time to start"


class Keeper:
    """The best schedule and bound of a search so far. Schedules leave the solver's process here: each is verified."""

    def __init__(self, problem: Problem, options: SolveOptions) -> None:
        self._problem, self._options, self._stack = problem, options, STACKS[options.stack]
        self.result = Result(
            "unknown", objective=options.objective, reason=NOTHING_YET, placements=options.placements_of(problem)
        )
        self._began, self._is_silent, self._report = time.monotonic(), True, Note(text="")
        self._other_stages: Schedule | None = None  # for the final result
        self.ready_at: float | None = None  # the moment from which the time limit counts

    def take(self, frame: Frame) -> bool:
        """Take a frame of the solver; returns whether a schedule or a status is news."""
        best = self.result
        self._is_silent = self._is_silent and isinstance(frame, End)
        if isinstance(frame, Ready):
            self.ready_at = self.ready_at or time.monotonic()
        elif isinstance(frame, Incumbent):
            self._take_schedule(frame)
        elif isinstance(frame, Bound) and frame.lower_bound_ms > (best.lower_bound_ms or -1.0):
            better = replace(best, lower_bound_ms=frame.lower_bound_ms)
            self.result = replace(better, status=better.proven_status)
        elif isinstance(frame, Infeasible) and best.schedule is None:
            self.result = replace(best, status="infeasible", reason=frame.reason)
        elif isinstance(frame, Remedies):
            self.result = replace(best, remedies=frame.remedies)
        elif isinstance(frame, OtherStages):
            self._other_stages = self._verified(frame.schedule, frame.schedule.method, "all")
        elif isinstance(frame, Note):
            self._report = frame if frame.method else self._report
            self._note(frame)
        self.result = replace(self.result, time_s=time.monotonic() - self._began)
        return self.result.schedule is not best.schedule or self.result.status != best.status

    def _take_schedule(self, frame: Incumbent) -> None:
        """Keep an incumbent that is valid on the problem that was asked about, and better."""
        best, options = self.result, self._options
        schedule = self._verified(frame.schedule, frame.method, best.placements)
        value_ms = length_ms(schedule, options.objective)
        if schedule and is_better(value_ms, frame.method, best.value_ms, best.method):
            step = Improvement(time.monotonic() - self._began, frame.method, value_ms, best.lower_bound_ms)
            self.result = replace(
                Result.from_schedule(schedule, options, best.lower_bound_ms, frame.method),
                notes=best.notes,
                reports=best.reports,
                history=(*best.history, step),
                rejected=best.rejected,
            )
        else:
            self.result = replace(self.result, rejected=best.rejected + 1)

    def _verified(self, programs: Programs, method: str, placements: Placements) -> Schedule | None:
        """The schedule that the solver sent; None, and a note, if it is not valid, not for the stack, or not on these
        stages."""
        try:
            schedule = programs.schedule(self._problem, method)
            wrong = self._stack.first_fault(schedule)
            if schedule.placement and placements == "keep":
                wrong = f"{schedule.placement}: the stages were to be kept"
        except InputError as error:
            wrong = str(error)
        if wrong:
            self._note(Note(text=f"a schedule of {method} was rejected: {wrong}"))
        return None if wrong else schedule

    def _note(self, note: Note) -> None:
        best = self.result
        if not note.ongoing and len(best.notes) < MOST_NOTES:
            reports = (*best.reports, note.text) if note.method else best.reports
            self.result = replace(best, notes=(*best.notes, note.text), reports=reports)

    def end(self, failure: SolverError | None) -> Result:
        """Return the final result of a solver that has ended, or failed."""
        passed_s = time.monotonic() - self._began
        if self._report.ongoing:
            self._note(self._report.stopped(passed_s))
        best = self.result
        if failure:
            rejected = best.rejected + isinstance(failure, FrameError)
            best = replace(best, notes=(*best.notes, str(failure)), failure=str(failure), rejected=rejected)
        elif self._is_silent and passed_s >= self._options.time_limit_s:  # else somebody cancelled it
            best = replace(best, notes=(*best.notes, SILENT.format(passed_s)))
        if best.status == "unknown" and best.notes:
            best = replace(best, reason=best.notes[-1])
        self.result = replace(best, time_s=passed_s, other_stages=self._other_stages)
        return self.result


class Hit(Protocol):
    """A schedule that is valid for the problem asked about, and what was proven of it there."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def status(self) -> Found: ...

    @property
    def lower_bound_ms(self) -> float | None: ...

    @property
    def source(self) -> str:
        """`cache`, or where else it was found."""


class ScheduleCache(Protocol):
    """Solved schedules. Both methods raise `OptPipeError` if the cache cannot be used; searches then go on without."""

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """Return a schedule of this problem, or one adapted to it."""

    def add(
        self,
        schedule: Schedule,
        status: Found,
        lower_bound_ms: float | None = None,
        objective: Objective = "makespan",
        *,
        verified: bool = False,
    ) -> object:
        """Keep a schedule if it is better than the one that is there for its problem."""


def better_start(problem: Problem, warm_start: Schedule | None, hit: Hit, objective: Objective) -> Schedule:
    """The shorter of two schedules to start from; the hit if the warm start is not valid for this problem."""
    if warm_start is None:
        return hit.schedule
    try:
        candidates = [hit.schedule] if check(problem, warm_start) else [warm_start, hit.schedule]
        return min(candidates, key=lambda schedule: length_ms(schedule.on(problem), objective))
    except (OptPipeError, LookupError):  # it is of other stages
        return hit.schedule


class SearchCache:
    """A search's use of a cache, if it has one. Its errors become notes, and so does a schedule from the pack."""

    def __init__(self, cache: ScheduleCache | None) -> None:
        self._cache = cache
        self._kept: tuple[Schedule | None, float | None] = None, None
        self.note: str | None = None

    def hit(self, problem: Problem, options: SolveOptions) -> Hit | None:
        """What the stack can run."""
        try:
            hit = self._cache.lookup(problem, options.objective) if self._cache else None
        except OptPipeError as error:
            self.note = str(error)
            return None
        if hit and STACKS[options.stack].complaint(hit.schedule):
            return None
        if hit and hit.source != "cache":
            ms = length_ms(hit.schedule, options.objective)
            self.note = f"the search began with a schedule of {ms:.6g} ms from the {hit.source}"
        return hit

    def keep(self, schedule: Schedule, status: Found, lower_bound_ms: float | None, objective: Objective) -> None:
        """Stores what the search has found, once."""
        kept_schedule, kept_bound_ms = self._kept
        if self._cache is None or (kept_schedule is schedule and kept_bound_ms == lower_bound_ms):
            return
        self._kept = schedule, lower_bound_ms
        try:
            self._cache.add(schedule, status, lower_bound_ms, objective, verified=True)
        except OptPipeError as error:
            self.note = str(error)


class Search:
    """An iterator of better and better results; the last one is final. `cancel()` from any thread ends it early."""

    def __init__(self, keeper: Keeper, cache: SearchCache, request: Request | None, admit: Admit | None) -> None:
        """Starts a solver's process; without a request the result that the keeper has is final."""
        self._keeper, self._cache = keeper, cache
        self._child: Child | None = None
        self._results: Iterator[Result] = iter([keeper.result])
        if request:
            self._child = child = Child(solvers.installed().SEARCH, request, admit)
            deadline = _stopping(child, LOADING_S + request.time_limit_s + GRACE_S)
            self._results = _results(request, child, deadline, keeper)
            # Not __del__: in a reference cycle the child's files would be finalized before it.
            weakref.finalize(self, _abandon, deadline, child)

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        result = next(self._results)
        if result.schedule is not None:
            self._cache.keep(result.schedule, result.found_status, result.lower_bound_ms, result.objective)
        return replace(result, notes=(*result.notes, self._cache.note)) if self._cache.note else result

    @property
    def mark(self) -> str:
        """The mark of all its processes (`optpipe.process.process_tree`); empty if there are none."""
        return self._child.mark if self._child else ""

    @property
    def ran_s(self) -> float:
        """Seconds of its time limit that have passed: since its process was ready to search; 0 before."""
        return time.monotonic() - self._keeper.ready_at if self._keeper.ready_at else 0.0

    @property
    def best(self) -> Result:
        """The best result so far. Unlike the results that are iterated over, it has every new bound at once."""
        return self._keeper.result

    def cancel(self) -> None:
        """Ends the search; the results end with the best so far."""
        if self._child:
            self._child.stop()


def _stopping(child: Child, seconds: float) -> threading.Timer:
    """A timer that runs, and stops the child."""
    deadline = threading.Timer(seconds, child.stop)
    deadline.daemon = True
    deadline.start()
    return deadline


def _abandon(deadline: threading.Timer, child: Child) -> None:
    deadline.cancel()
    child.close()


def _results(request: Request, child: Child, deadline: threading.Timer, keeper: Keeper) -> Iterator[Result]:
    failure = None
    try:
        for frame in child.frames():
            if isinstance(frame, Refused):
                raise InputError(frame.reason)
            if isinstance(frame, Ready):
                deadline.cancel()
                deadline = _stopping(child, request.time_limit_s + GRACE_S)
            if keeper.take(frame) and isinstance(frame, Incumbent | Infeasible):
                yield keeper.result
            if request.gap and keeper.result.gap is not None and keeper.result.gap <= request.gap:
                break
    except SolverError as error:
        failure = error
    finally:
        deadline.cancel()
        child.stop()
    yield keeper.end(failure)


def improve(
    problem: Problem,
    *,
    warm_start: Schedule | None = None,
    cache: ScheduleCache | None = None,
    admit: Admit | None = None,
    **options: Unpack[SolveArguments],
) -> Search:
    """Searches in the background: the first schedule comes within moments from a heuristic, better ones from engines.

    Raises InputError if an option is unknown or out of range. An unknown method is reported when the first result is
    asked for.

    Parameters
    ----------
    warm_start
        Any schedule to start from, also one for costs that have since changed.
    cache
        Solved schedules, such as `optpipe_cache.Cache(path)`. The search starts from one of them if that is shorter,
        and every better schedule is kept there. A proven schedule of this problem is the answer. A heuristic or a
        published schedule that is asked for is computed anew.
    admit
        Called with the id of the solver's process before it is asked anything, to set limits for it.
    options
        `optpipe.options.SolveOptions`, such as `method="cpsat", time_limit_s=20`; docs/commands.md has a table.
    """
    return search(problem, SolveOptions.from_arguments("improve", options), warm_start, cache, admit)


def search(
    problem: Problem,
    options: SolveOptions,
    warm_start: Schedule | None = None,
    cache: ScheduleCache | None = None,
    admit: Admit | None = None,
) -> Search:
    """`improve` by options that have been checked."""
    if warm_start is not None and not isinstance(warm_start, Schedule):
        raise InputError(
            f"warm_start is of type {type(warm_start).__name__}: a Schedule was expected (Schedule.load reads a file)"
        )
    problem, options = restricted(problem, options), options.for_problem(problem)
    used, keeper = SearchCache(cache), Keeper(problem, options)
    hit = used.hit(problem, options) if options.starts_from_known else None
    if hit:
        if hit.status == "optimal" and options.answered_by_optimum:
            method = f"{hit.schedule.method} (cached)"
            keeper.result = Result.from_schedule(hit.schedule, options, hit.lower_bound_ms, method)
            return Search(keeper, used, None, admit)
        warm_start = better_start(problem, warm_start, hit, options.objective)
    chosen = options.arguments()
    chosen["threads"] = chosen["threads"] or os.cpu_count() or 1
    start = Programs.from_schedule(warm_start) if warm_start is not None else None
    request = Request.model_validate({"problem": problem, "warm_start": start, **chosen})
    return Search(keeper, used, request, admit)


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
    *_, last = search(problem, SolveOptions.from_arguments("solve", options), warm_start, cache)
    return last
