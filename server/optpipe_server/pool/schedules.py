"""Tasks that make schedules (first ones of submissions, all published ones for the workbench), and that show a stored
one: as a picture, as a trace, in the form of another program."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from optpipe import solvers
from optpipe.comparison import Row, rows_of
from optpipe.errors import InputError, ScheduleError
from optpipe.formats import Export, export
from optpipe.model.problem import Problem
from optpipe.process.protocol import CompareRequest, Frame, Incumbent, Programs, Refused, Request
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe.show.figure import figure, side_by_side
from optpipe.show.trace import trace
from optpipe_server.accepted import read_schedule

INCUMBENTS_KEPT = 3  # of an answer: the last one is the best, the others replace it if it is not valid
MOST_OPS = 20_000  # of an edited schedule


class Late(BaseException):
    """The task's time is over, or nobody waits for it any more."""


def warm_up() -> None:
    """Load and compile what tasks need, so that nobody waits for it."""
    import_module(solvers.installed().COMPARE)
    import_module(solvers.installed().FIRST).warm_up()


def first_schedules(module: str, request: str) -> list[Frame]:
    """Return the last frame of each kind that the solver sends for a `Request` until it ends or its time is over, and
    behind them its schedules, the best one first. Raises `InputError` if it refuses the request."""
    last, incumbents = dict[type[Frame], Frame](), deque[Frame](maxlen=INCUMBENTS_KEPT)

    def add(frame: Frame) -> None:
        if isinstance(frame, Refused):
            raise InputError(frame.reason)
        if isinstance(frame, Incumbent):
            incumbents.append(frame)
        else:
            last[type(frame)] = frame

    with suppress(Late):
        import_module(module).answer(Request.model_validate_json(request), add)
    return [*last.values(), *reversed(incumbents)]


class _Row(NamedTuple):
    """One method: what the reply says of it but `drawn`, and its schedule, if that can be drawn."""

    shown: dict[str, Any]
    schedule: Schedule | None


def published(module: str, request: str) -> str:
    """Return the workbench's reply for a `CompareRequest`: a row for each method. Raises `InputError` for an unknown
    one."""
    frames: list[Frame] = []
    asked = CompareRequest.model_validate_json(request)
    import_module(module).answer(asked, frames.append)
    try:
        return _reply([_compared(row) for row in rows_of(frames, asked.problem, asked)])
    except InputError as error:
        raise InputError(f"workbench: {error}") from None


def edited(problem: str, schedule: str) -> str:
    """Return the workbench's reply for one schedule document, which may be invalid; it is drawn if it can run."""
    read = read_schedule(ScheduleFile.model_validate_json(schedule), Problem.from_json(problem))
    if (ops := sum(map(len, read.programs))) > MOST_OPS:
        raise InputError(f"workbench: schedule has {ops} ops: expected up to {MOST_OPS} here")
    wrong = check(read.problem, read)
    try:
        runs = ops > 0 and read.makespan_ms >= 0
    except ScheduleError:  # a deadlock, or other ops than the problem's, as `wrong` says
        runs = False
    return _reply([_row(read.method, wrong, read if runs else None)])


def _reply(rows: list[_Row]) -> str:
    """The shortest that fits first; `drawn` is a row's place in the figure."""
    rows.sort(
        key=lambda row: (not row.schedule, not row.shown["fits"], row.schedule.makespan_ms if row.schedule else 0.0)
    )
    drawn = [row.schedule for row in rows if row.schedule is not None]
    return _json(
        {
            "rows": [row.shown | {"drawn": place if row.schedule else None} for place, row in enumerate(rows)],
            "figure": side_by_side(drawn) if drawn else None,
        }
    )


def _row(method: str, wrong: list[str], schedule: Schedule | None = None, bound_ms: float | None = None) -> _Row:
    placement = schedule.placement if schedule else None
    shown = {
        "method": method,
        "fits": not wrong,
        "wrong": wrong,
        "placement": placement.model_dump(mode="json", exclude_none=True) if placement else None,
        "lower_bound_ms": bound_ms,
    }
    return _Row(shown, schedule)


def _compared(row: Row) -> _Row:
    if row.schedule is None:
        return _row(row.method, [row.reason or ""])
    schedule = replace(row.schedule, method=row.method)
    return _row(row.method, schedule.compiled.complaints, schedule, row.result.lower_bound_ms)


class Stored(NamedTuple):
    """A schedule as the database has it: problem and `Programs` as JSON, and the method."""

    problem: str
    programs: str
    method: str

    def read(self) -> Schedule:
        return Programs.model_validate_json(self.programs).schedule(Problem.from_json(self.problem), self.method)


def drawn(stored: Stored, before: Stored | None, bound_ms: float | None) -> str:
    return _json(figure(stored.read(), before.read() if before else None, bound_ms))


def traced(stored: Stored) -> str:
    return trace(stored.read())


def exported(stored: Stored, to: str, without_offload: bool) -> Export:
    return export(stored.read(), to, without_offload)


def _json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
