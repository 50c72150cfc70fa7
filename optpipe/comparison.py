"""`compare`: every published schedule, every heuristic and the solver's own answer on one problem, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from pydantic import ValidationError

from optpipe.anytime import solve
from optpipe.errors import InputError, OptPipeError, input_error
from optpipe.evaluate.memory import Certificate, Peak
from optpipe.evaluate.objective import gap
from optpipe.model.offload import offload_ratio
from optpipe.model.problem import Problem
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, Incumbent, Note, Placements, Refused, Request
from optpipe.schedule import Schedule

GENERATOR = "optpipe_solver.compare"
SOLVER = "auto"  # among the methods: what `solve` finds


@dataclass(frozen=True)
class Row:
    """One method: its schedule, even if it does not fit, or the reason why it has none. Times in ms."""

    method: str
    placements: Placements = "all"  # whether it could choose its stages
    schedule: Schedule | None = None
    # of schedules on the same stages; in the solver's row of all stages that it could choose
    lower_bound_ms: float | None = None
    reason: str | None = None  # why it does not fit, or does not apply to the problem

    @property
    def fits(self) -> bool:
        return self.schedule is not None and self.reason is None

    @property
    def makespan_ms(self) -> float | None:
        return self.schedule.makespan_ms if self.schedule else None

    @property
    def span_ms(self) -> float | None:
        return self.schedule.span_ms if self.schedule else None

    @property
    def bubble(self) -> float | None:
        return self.schedule.timeline.bubble if self.schedule else None

    @property
    def gap(self) -> float | None:
        """How much shorter a schedule could at most be, as a share of this one; None if it does not fit."""
        return gap(self.makespan_ms, self.lower_bound_ms) if self.fits else None

    @cached_property
    def certificate(self) -> Certificate | None:
        return self.schedule.compiled.certificate if self.schedule else None

    @property
    def peak(self) -> tuple[int, Peak] | None:
        """The device with the highest share of its memory in use, and its peak."""
        return _fullest(self.certificate.device) if self.certificate else None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON takes it; what is not known is None."""
        schedule, certificate = self.schedule, self.certificate
        placement = (
            schedule.placement.model_dump(mode="json", exclude_none=True) if schedule and schedule.placement else None
        )
        return {
            "method": self.method,
            "placements": self.placements,
            "found_by": schedule.method if schedule else None,
            "fits": self.fits,
            "makespan_ms": self.makespan_ms,
            "span_ms": self.span_ms,
            "bubble": self.bubble,
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "placement": placement,
            "peak_bytes": [peak.bytes for peak in certificate.device] if certificate else None,
            "host_peak_bytes": [peak.bytes for peak in certificate.host] if certificate else None,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Comparison:
    """Rows in order: those that fit, the shortest first, then those that do not fit, then those that do not apply."""

    problem: Problem
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row]) -> Comparison:
        """Sorts the rows. The solver's bound for the stages as given also holds for all others on these stages."""

        def place(row: Row) -> tuple[bool, bool, float, bool]:
            return row.schedule is None, not row.fits, row.makespan_ms or 0.0, row.method != SOLVER

        proven = max(
            (row.lower_bound_ms or 0.0 for row in rows if row.method == SOLVER and row.placements == "keep"),
            default=0.0,
        )
        return cls(problem, tuple(sorted((_bounded(row, proven) for row in rows), key=place)))

    def to_dict(self) -> dict[str, Any]:
        """For programs, as JSON takes it, which has no infinity; `k` is `offload_ratio` of each stage."""
        ratios = [None if ratio == float("inf") else ratio for ratio in offload_ratio(self.problem)]
        return {"problem": self.problem.name, "k": ratios, "rows": [row.to_dict() for row in self.rows]}


def _bounded(row: Row, proven_ms: float) -> Row:
    own = row.method != SOLVER and row.schedule is not None and row.schedule.placement is None
    return replace(row, lower_bound_ms=max(row.lower_bound_ms or 0.0, proven_ms)) if own else row


def compare(
    problem: Problem,
    methods: Sequence[str] | None = None,
    time_limit: float = 10.0,
    *,
    threads: int | None = None,
    placements: Placements = "all",
    memory_mib: int | None = None,
    told: Callable[[Row], None] | None = None,
) -> Comparison:
    """Every published schedule, every heuristic and what `solve` finds on one problem, side by side.

    Parameters
    ----------
    problem
        What is to be scheduled.
    methods
        Only these; `auto` among them is what `solve` finds.
    time_limit
        Seconds for each search.
    threads
        For each search; by default the machine's cores.
    placements
        With `all` each published schedule runs on the stages that it is for, and there are two searches: on the stages
        as given, and on any stages.
    memory_mib
        A limit on what the processes of a search hold together.
    told
        Called with each row as it comes.

    Raises
    ------
    InputError
        If a method is unknown, or an argument is out of range.
    """
    names = [SOLVER] if methods is None else [name for name in dict.fromkeys(methods) if name != SOLVER]
    for name in names:
        if len(name.split()) != 1:
            raise InputError(f"methods: {name!r} is not the name of a method")
    try:
        request = Request(
            problem=problem,
            method=" ".join(names),
            time_limit_s=time_limit,
            threads=1 if threads is None else threads,
            placements=placements,
            memory_mib=memory_mib,
        )
    except ValidationError as error:
        # The field under the name that the caller gave it.
        raise InputError(str(input_error(error, "compare")).replace("time_limit_s", "time_limit", 1)) from None
    searches: tuple[Placements, ...] = ("keep", "all") if placements == "all" else ("keep",)
    found = chain(
        _generated(request) if names else (),
        (
            _searched(problem, time_limit, threads, free, memory_mib)
            for free in searches
            if methods is None or SOLVER in methods
        ),
    )
    rows = []
    for row in found:
        rows.append(row)
        if told:
            told(row)
    return Comparison.of(problem, rows)


def _generated(request: Request) -> Iterator[Row]:
    """The rows that one process makes, without a search."""
    problem, placements = request.problem, request.placements
    with contextlib.closing(Child(GENERATOR, request)) as child:
        bounds: dict[str, float] = {}
        for frame in child.frames():
            if isinstance(frame, Refused):
                raise InputError(frame.reason)
            if isinstance(frame, Bound):
                bounds[frame.method] = frame.lower_bound_ms
            elif isinstance(frame, Note):
                yield Row(frame.method, placements, reason=frame.text)
            elif isinstance(frame, Incumbent):
                yield _verified(frame, problem, placements, bounds.get(frame.method))


def _verified(found: Incumbent, problem: Problem, placements: Placements, lower_bound_ms: float | None) -> Row:
    try:
        schedule = found.schedule.schedule(problem, found.method)
        wrong, certificate = schedule.compiled.complaints, schedule.compiled.certificate
    except OptPipeError as error:
        return Row(found.method, placements, reason=f"is no schedule: {error}")
    if wrong != certificate.complaints():
        return Row(found.method, placements, reason=f"is no schedule: {wrong[0]}")
    return Row(found.method, placements, schedule, lower_bound_ms, _why_not(certificate) if wrong else None)


def _why_not(certificate: Certificate) -> str:
    of, peaks = (
        ("", certificate.device)
        if not all(peak.fits for peak in certificate.device)
        else (" of host memory", certificate.host)
    )
    device, peak = _fullest(peaks)
    return f"needs {peak.bytes} of {peak.limit} bytes{of} on device {device}"


def _fullest(peaks: Sequence[Peak]) -> tuple[int, Peak]:
    """By what each may hold."""

    def share(device: int) -> float:
        peak = peaks[device]
        return (
            0.0
            if peak.limit is None
            else peak.bytes / peak.limit
            if peak.limit
            else (float("inf") if peak.bytes else 0.0)
        )

    device = max(range(len(peaks)), key=share)
    return device, peaks[device]


def _searched(
    problem: Problem, time_limit: float, threads: int | None, placements: Placements, memory_mib: int | None
) -> Row:
    result = solve(
        problem, method=SOLVER, time_limit=time_limit, threads=threads, placements=placements, memory_mib=memory_mib
    )
    return Row(SOLVER, placements, result.schedule, result.lower_bound_ms, None if result.schedule else result.reason)
