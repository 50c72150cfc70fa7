"""`improve` and `solve`: better and better schedules from a solver in a process of its own, each verified before anyone
sees it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from pydantic import ValidationError

from optpipe.errors import FrameError, InputError, SolverError, input_error
from optpipe.evaluate.jitter import percentile_ms
from optpipe.evaluate.validity import check
from optpipe.files import Status
from optpipe.model.problem import Problem
from optpipe.process.child import (
    Bound,
    Child,
    Frame,
    Incumbent,
    Infeasible,
    Note,
    Objective,
    Placements,
    Programs,
    Refused,
    Request,
)
from optpipe.schedule import Schedule

GRACE_S = 3.0  # a solver that has not ended this long after its time limit is ended
MOST_NOTES = 200  # a solver that tells more is not heard
PROVEN = 1e-9  # a gap that is rounding
SOLVER = "optpipe_solver"


@dataclass(frozen=True)
class Step:
    """One incumbent: when it came, whose it is, what counts of it, and the best bound by then. `time_s` in s, the rest
    in ms."""

    time_s: float
    method: str
    value_ms: float
    lower_bound_ms: float | None


@dataclass(frozen=True)
class Result:
    """What is known at some moment: the best schedule and the best lower bound so far. Times in ms, `time_s` since the
    search began."""

    status: Status
    schedule: Schedule | None = None
    objective: Objective = "makespan"
    lower_bound_ms: float | None = None
    method: str = ""
    time_s: float = 0.0
    reason: str | None = None  # why there is no schedule
    notes: tuple[str, ...] = ()  # what went wrong on the way, such as an engine that crashed
    percentile_ms: float | None = (
        None  # where there is jitter: the objective's 95th percentile under that noise (`optpipe.evaluate.jitter`)
    )
    history: tuple[Step, ...] = ()  # the incumbents so far, this one last
    rejected: int = 0  # what the solver wrote that was no valid schedule, no better than one before, or no frame
    failure: str | None = None  # what the solver's process did instead of ending its search; also the last of the notes

    @property
    def makespan_ms(self) -> float | None:
        return self.schedule.makespan_ms if self.schedule else None

    @property
    def span_ms(self) -> float | None:
        return self.schedule.span_ms if self.schedule else None

    @property
    def objective_ms(self) -> float | None:
        return self.makespan_ms if self.objective == "makespan" else self.span_ms

    @property
    def value_ms(self) -> float | None:
        """What the search makes small: the percentile where there is jitter, else the objective."""
        return self.objective_ms if self.percentile_ms is None else self.percentile_ms

    @property
    def gap(self) -> float | None:
        """How much shorter a schedule could at most be by its nominal times, as a share of this one; 0 is proven
        optimal, jitter aside."""
        value = self.objective_ms
        if value is None or self.lower_bound_ms is None:
            return None
        return max(0.0, 1.0 - self.lower_bound_ms / value) if value else 0.0


def merged(best: Result, new: Result) -> Result:
    """The better schedule of two results for one problem, with the better bound that it does not disprove; the rest is
    the new one's."""
    value, other = best.objective_ms, new.objective_ms
    kept = best if other is None or (value is not None and value <= other) else new
    most = float("inf") if kept.objective_ms is None else kept.objective_ms * (1 + PROVEN) + PROVEN
    bounds = [b.lower_bound_ms for b in (best, new) if b.lower_bound_ms is not None and b.lower_bound_ms <= most]
    result = replace(new, schedule=kept.schedule, method=kept.method, lower_bound_ms=max(bounds, default=None))
    if result.schedule is None:
        return result
    proven = result.gap is not None and result.gap <= PROVEN
    return replace(result, status="optimal" if proven else "feasible", reason=None)


class Search:
    """An iterator of better and better results; the last one is final. `cancel()` from any thread ends it with the best
    so far."""

    def __init__(self, request: Request, gap: float = 0.0, admit: Callable[[int], None] | None = None) -> None:
        self._child = Child(SOLVER, request, admit)
        self._deadline = threading.Timer(request.time_limit_s + GRACE_S, self._child.stop)
        self._deadline.daemon = True
        self._deadline.start()
        self._results = _results(request, self._child, self._deadline, gap)
        weakref.finalize(
            self, _abandon, self._deadline, self._child
        )  # not __del__: in a cycle the child's files would be finalized first

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        return next(self._results)

    @property
    def family(self) -> str:
        """The mark of all its processes (`optpipe.process.family`)."""
        return self._child.family

    def cancel(self) -> None:
        self._child.stop()


def _abandon(deadline: threading.Timer, child: Child) -> None:
    deadline.cancel()
    child.close()


def _results(request: Request, child: Child, deadline: threading.Timer, gap: float) -> Generator[Result, None, None]:
    began = time.monotonic()
    best = shown = Result(
        "unknown", objective=request.objective, reason="no schedule was found before the search ended"
    )
    try:
        for frame in child.frames():
            if isinstance(frame, Refused):
                raise InputError(frame.reason)
            now = replace(_after(best, frame, request), time_s=time.monotonic() - began)
            best = now if now.schedule is best.schedule else _with_step(now)
            if isinstance(frame, Incumbent | Infeasible) and (best.schedule, best.status) != (
                shown.schedule,
                shown.status,
            ):
                yield best
                shown = best
            if gap and best.gap is not None and best.gap <= gap:
                break
    except SolverError as error:
        rejected = best.rejected + isinstance(error, FrameError)
        best = replace(best, notes=(*best.notes, str(error)), failure=str(error), rejected=rejected)
    finally:
        deadline.cancel()
        child.stop()
    if best.status == "unknown" and best.notes:
        best = replace(best, reason=best.notes[-1])
    yield replace(best, time_s=time.monotonic() - began)


def _after(best: Result, frame: Frame, request: Request) -> Result:
    """What is known after one more frame."""
    if isinstance(frame, Incumbent):
        return _with_incumbent(best, frame, request)
    if isinstance(frame, Bound) and (best.lower_bound_ms is None or frame.lower_bound_ms > best.lower_bound_ms):
        return _judged(replace(best, lower_bound_ms=frame.lower_bound_ms))
    if isinstance(frame, Infeasible) and best.schedule is None:
        return replace(best, status="infeasible", reason=frame.reason)
    if isinstance(frame, Note):
        return _noted(best, frame.text)
    return best


def _noted(best: Result, text: str) -> Result:
    return replace(best, notes=(*best.notes, text)) if len(best.notes) < MOST_NOTES else best


def _with_incumbent(best: Result, frame: Incumbent, request: Request) -> Result:
    try:
        schedule = frame.schedule.schedule(request.problem, frame.method)
        wrong = check(schedule.problem, schedule)  # this problem, or the one that the placement makes of it
        if schedule.placement and request.placements == "keep":
            wrong = [f"{schedule.placement}: the stages were to be kept"]
    except InputError as error:
        wrong = [str(error)]
    if wrong:
        return _noted(
            replace(best, rejected=best.rejected + 1), f"a schedule of {frame.method} was rejected: {wrong[0]}"
        )
    percentile = percentile_ms(schedule, request.jitter, request.objective, request.seed) if request.jitter else None
    better = replace(
        best, schedule=schedule, method=frame.method, status="feasible", reason=None, percentile_ms=percentile
    )
    if best.value_ms is not None and better.value_ms is not None and better.value_ms >= best.value_ms:
        return replace(best, rejected=best.rejected + 1)
    return _judged(better)


def _with_step(result: Result) -> Result:
    assert result.value_ms is not None, "a schedule has a value"
    return replace(
        result, history=(*result.history, Step(result.time_s, result.method, result.value_ms, result.lower_bound_ms))
    )


def _judged(result: Result) -> Result:
    """`optimal` only where the bound proves it, which says nothing of a percentile."""
    if result.percentile_ms is not None:
        return result
    value, bound = result.objective_ms, result.lower_bound_ms
    proven = value is not None and bound is not None and value <= bound * (1 + 1e-9) + 1e-9
    return replace(result, status="optimal") if proven else result


class Options(TypedDict, total=False):
    """The keyword arguments of `improve`, for whoever passes them on."""

    method: str
    time_limit: float
    threads: int | None
    objective: Objective
    warm_start: Schedule | None
    seed: int
    solver: str
    placements: Placements
    jitter: float
    memory_mib: int | None
    gap: float


def improve(
    problem: Problem,
    *,
    method: str = "auto",
    time_limit: float = 60.0,
    threads: int | None = None,
    objective: Objective = "makespan",
    warm_start: Schedule | None = None,
    seed: int = 0,
    solver: str = "auto",
    placements: Placements = "keep",
    jitter: float = 0.0,
    memory_mib: int | None = None,
    gap: float = 0.0,
    admit: Callable[[int], None] | None = None,
) -> Search:
    """Better and better schedules: the first within moments, from a heuristic, then what the engines find until
    `time_limit` (seconds).

    Iterate over the `Result`s; the last one is final. `warm_start` may be any schedule, also one for costs that have
    since changed. `solver` is the MILP's (auto, highs, gurobi, pulp or pulp:NAME). With `placements="all"` the devices'
    work may be split into other stages, and the schedule is one of `schedule.problem`. With `jitter` the 95th
    percentile of the objective counts, each op's time varying by that share (standard deviation). `memory_mib` limits
    what the solver's processes hold together. The search ends once the gap is `gap` or less. `admit` is called with the
    id of the solver's process before that is asked, to set limits of the caller's own. Raises `InputError` for an
    argument out of range; an unknown method is known to be one when the first result is asked for.
    """
    if warm_start is not None and not isinstance(warm_start, Schedule):
        raise InputError(
            f"improve: warm_start is of type {type(warm_start).__name__}: a Schedule was expected (Schedule.load "
            "reads a file)"
        )
    try:
        request = Request(
            problem=problem,
            method=method,
            objective=objective,
            time_limit_s=time_limit,
            threads=(os.cpu_count() or 1) if threads is None else threads,
            seed=seed,
            warm_start=Programs.of(warm_start) if warm_start is not None else None,
            solver=solver,
            placements=placements,
            jitter=jitter,
            memory_mib=memory_mib,
        )
    except ValidationError as error:
        raise InputError(
            str(input_error(error, "improve")).replace("time_limit_s", "time_limit", 1)
        ) from None  # as it was given
    return Search(request, gap, admit)


def solve(problem: Problem, **options: Unpack[Options]) -> Result:
    """The best schedule within the time; arguments as `improve`. A problem without one ends with status `infeasible`
    and the reason."""
    *_, last = improve(problem, **options)
    return last
