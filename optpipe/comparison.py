"""`compare`: every published schedule, every heuristic and the solver's own answer on one problem, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any, Unpack, get_args

from optpipe import solvers
from optpipe.anytime import search
from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.effects import Certificate, Peak
from optpipe.formats.stacks import STACKS, restricted
from optpipe.model.problem import Problem, offload_ratio
from optpipe.options import CompareOptions, Placements, SearchArguments, SolveOptions
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, CompareRequest, Frame, Incumbent, Note, Refused
from optpipe.results import Result, merged
from optpipe.schedule import Schedule
from optpipe.text import distinct_sizes

SOLVER = "auto"  # among the methods: what `solve` finds
NOTHING = Result("unknown")


def is_search(method: str) -> bool:
    """Whether a method searches, rather than making one schedule."""
    return method == SOLVER or method in solvers.installed().ENGINES


@dataclass(frozen=True)
class Row:
    """One method: its schedule, even if it does not fit, or the reason why it has none. Times in ms."""

    method: str
    placements: Placements = "all"  # whether it could choose its stages
    result: Result = NOTHING  # its bound is for the same stages; in a search's row for all stages it could choose
    reason: str | None = None  # why it does not fit, or does not apply to the problem

    @property
    def schedule(self) -> Schedule | None:
        return self.result.schedule

    @property
    def fits(self) -> bool:
        return self.schedule is not None and self.reason is None

    @property
    def makespan_ms(self) -> float | None:
        return self.result.makespan_ms

    @property
    def gap(self) -> float | None:
        """How much shorter a schedule could at most be, as a share of this one; None if it does not fit."""
        return self.result.gap if self.fits else None

    @property
    def certificate(self) -> Certificate | None:
        return self.schedule.compiled.certificate if self.schedule else None

    @property
    def peak(self) -> tuple[int, Peak] | None:
        """The device with the highest share of its memory in use, and its peak."""
        return fullest(self.certificate.device) if self.certificate else None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON takes it; None for what is missing."""
        figures = self.result.to_dict()
        names = "makespan_ms", "span_ms", "bubble", "lower_bound_ms", "placement", "peak_bytes", "host_peak_bytes"
        return {
            "method": self.method,
            "placements": self.placements,
            "found_by": self.schedule.method if self.schedule else None,
            "fits": self.fits,
            **{name: figures[name] for name in names},
            "gap": self.gap,
            "reason": self.reason,
            "notes": list(self.result.notes),
        }


@dataclass(frozen=True)
class Comparison:
    """Rows in order: those that fit, the shortest first, then those that do not fit, then those that do not apply."""

    problem: Problem
    options: CompareOptions
    rows: tuple[Row, ...]

    @classmethod
    def from_rows(cls, problem: Problem, options: CompareOptions, rows: Sequence[Row]) -> Comparison:
        """Sorts the rows. A search's bound for the problem's own stages also holds for all others on them."""

        def place(row: Row) -> tuple[bool, bool, float, bool]:
            return row.schedule is None, not row.fits, row.result.value_ms or 0.0, not is_search(row.method)

        proven = max(
            (row.result.lower_bound_ms or 0.0 for row in rows if is_search(row.method) and row.placements == "keep"),
            default=0.0,
        )
        bounded = []
        for row in rows:
            searched_all = is_search(row.method) and row.placements == "all"  # its bound holds for all stages
            if row.schedule and row.schedule.placement is None and not searched_all:
                bound_ms = max(row.result.lower_bound_ms or 0.0, proven)
                row = replace(row, result=replace(row.result, lower_bound_ms=bound_ms))
            bounded.append(row)
        return cls(problem, options, tuple(sorted(bounded, key=place)))

    @property
    def best(self) -> Row | None:
        """The shortest schedule that fits, if any does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def best_own(self) -> Row | None:
        """The shortest one that fits and comes from OptPipe."""
        return next((row for row in self.rows if row.fits and row.method in solvers.installed().OWN), None)

    @property
    def best_published(self) -> Row | None:
        """The shortest one that fits and comes from another paper than OptPipe's."""
        return next((row for row in self.rows if row.fits and row.method not in solvers.installed().OWN), None)

    def to_dict(self) -> dict[str, Any]:
        """For programs, as JSON takes it, which has no infinity; `k` is `offload_ratio` of each stage."""
        ratios = [None if ratio == float("inf") else ratio for ratio in offload_ratio(self.problem)]
        return {
            "problem": self.problem.name,
            "options": self.options.model_dump(mode="json"),
            "k": ratios,
            "rows": [row.to_dict() for row in self.rows],
        }


def compare(
    problem: Problem,
    methods: Sequence[str] | None = None,
    *,
    starts: Sequence[Schedule] = (),
    report: Callable[[Row], None] | None = None,
    **options: Unpack[SearchArguments],
) -> Comparison:
    """Every published schedule, every heuristic and what `solve` finds on one problem, side by side.

    With `placements="all"` each published schedule runs on the stages that it is for, and each search runs twice: on
    the problem's own stages, and from what it found there on any stages. `auto` begins with the schedules of the other
    rows, so none that fits is shorter than its answer.

    Raises InputError if a method is unknown, or an option is unknown or out of range.

    Parameters
    ----------
    methods
        Only these; `auto` among them is what `solve` finds, an engine's name what it finds with that engine.
    starts
        Schedules that searches start from, such as those found with less memory: none ends with a longer one.
    report
        Called with each row as it comes.
    options
        `optpipe.options.CompareOptions`; time limit, threads and memory are those of each search.
    """
    chosen = CompareOptions.from_arguments("compare", {**options, "methods": methods})
    problem = restricted(problem, chosen)
    rows: list[Row] = []
    for row in chain(_generated(problem, chosen), _searched(problem, chosen, starts, rows)):
        rows.append(row)
        if report:
            report(row)
    return Comparison.from_rows(problem, chosen, rows)


def searches(options: CompareOptions) -> list[tuple[str, Placements]]:
    """The searches of a comparison: each method that searches, and the stages that it may choose."""
    names = [name for name in (SOLVER, *solvers.installed().ENGINES) if name in (options.methods or (SOLVER,))]
    return [(name, each) for name in names for each in get_args(Placements) if each in ("keep", options.placements)]


def _generated(problem: Problem, options: CompareOptions) -> Iterator[Row]:
    """The rows of one process, which does not search."""
    names = [name for name in dict.fromkeys(options.methods or ()) if not is_search(name)]
    if options.methods and not names:
        return
    request = CompareRequest.model_validate({**options.search(), "methods": names or None, "problem": problem})
    with contextlib.closing(Child(solvers.installed().COMPARE, request)) as child:
        yield from rows_of(child.frames(), problem, options)


def rows_of(frames: Iterable[Frame], problem: Problem, options: CompareOptions) -> Iterator[Row]:
    """The rows of the answer to a `CompareRequest`, each verified. Raises InputError if a method is unknown."""
    bounds: dict[str, float] = {}
    for frame in frames:
        if isinstance(frame, Refused):
            raise InputError(frame.reason)
        if isinstance(frame, Bound):
            bounds[frame.method] = frame.lower_bound_ms
        elif isinstance(frame, Note):
            yield Row(frame.method, options.placements, reason=frame.text)
        elif isinstance(frame, Incumbent):
            yield _verified(frame, problem, options, bounds.get(frame.method))


def _verified(found: Incumbent, problem: Problem, options: CompareOptions, lower_bound_ms: float | None) -> Row:
    try:
        schedule = found.schedule.schedule(problem, found.method)
        wrong, certificate = schedule.compiled.complaints, schedule.compiled.certificate
    except OptPipeError as error:
        return Row(found.method, options.placements, reason=f"is no schedule: {error}")
    if wrong != certificate.complaints():
        return Row(found.method, options.placements, reason=f"is no schedule: {wrong[0]}")
    if complaint := STACKS[options.stack].complaint(schedule):
        return Row(found.method, options.placements, reason=complaint)
    reason = None
    if wrong:
        on_host = all(peak.fits for peak in certificate.device)
        device, peak = fullest(certificate.host if on_host else certificate.device)
        needed, limit = distinct_sizes(peak.bytes, peak.limit or 0)
        reason = f"device {device} needs {needed}{' of host memory' if on_host else ''} and has {limit}"
    return Row(found.method, options.placements, Result.from_schedule(schedule, options, lower_bound_ms), reason)


def fullest(peaks: Sequence[Peak]) -> tuple[int, Peak]:
    """The device with the highest share of its limit in use, and its peak."""

    def share(indexed: tuple[int, Peak]) -> float:
        size, limit = indexed[1].bytes, indexed[1].limit
        return 0.0 if limit is None or not size else size / limit if limit else inf

    return max(enumerate(peaks), key=share)


def _searched(
    problem: Problem, options: CompareOptions, starts: Sequence[Schedule], rows: Sequence[Row]
) -> Iterator[Row]:
    schedules: dict[str, list[Schedule]] = {}  # by each method
    for method, placements in searches(options):
        generated = [row.schedule for row in rows if row.fits and row.schedule and method == SOLVER]
        of_method = schedules.setdefault(method, [*starts, *generated])
        asked = SolveOptions.model_validate(options.search() | {"method": method, "placements": placements})
        result = solve_from(of_method, problem, asked)
        if result.schedule:
            of_method.append(result.schedule)
        yield Row(method, placements, result, None if result.schedule else result.reason)


def solve_from(schedules: Iterable[Schedule], problem: Problem, options: SolveOptions) -> Result:
    """`solve` from the shortest schedule that is valid for the problem; its answer is no longer than that one."""
    start = Result("unknown", objective=options.objective)
    for schedule in schedules:
        if schedule.placement is None or options.placements == "all":
            placed = schedule.placement.apply(problem) if schedule.placement else problem
            retimed = replace(schedule, problem=placed)
            if not STACKS[options.stack].first_fault(retimed):
                start = merged(start, Result.from_schedule(retimed, options))
    *_, last = search(problem, options, start.schedule)
    return merged(start, last)
