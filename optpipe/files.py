"""The schedule file, format `optpipe.schedule/2`: the problem, the programs, and what follows from them for whoever
only reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from optpipe.errors import InputError, input_error
from optpipe.model.ops import MARKS, Kind
from optpipe.model.placement import Placement
from optpipe.model.problem import Items, Problem, Record, TotalMs, read_file, write_file
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe.schedule import Schedule

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Found = Literal["optimal", "feasible"]
Texts = Items[str]


class DeviceProgram(Record):
    program: Texts


class TimedOp(Record):
    """One op that takes time, on the nominal timeline; drops, accepts and vacates take none and are left out."""

    kind: Literal["F", "B", "W", "BW", "C", "O", "R", "E", "L", "G", "U", "P"]
    stage: Annotated[int, Field(strict=True, ge=0)]
    microbatch: Annotated[int, Field(strict=True, ge=0)]
    part: Annotated[int, Field(strict=True, ge=0)] | None = None
    start_ms: TotalMs
    end_ms: TotalMs


class ScheduleFile(Record):
    """The document. Only `problem`, `devices` and `links` decide; the times are derived again by `simulate` before
    anyone uses them.

    Where `placement` is there, `problem` is the problem that was asked about with this placement.
    """

    format: Literal["optpipe.schedule/2"] = "optpipe.schedule/2"
    problem: Problem
    problem_sha256: Annotated[str, Field(max_length=64)] | None = None
    placement: Placement | None = None
    method: Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")] = ""
    status: Found = "feasible"
    makespan_ms: TotalMs | None = None
    span_ms: TotalMs | None = None
    lower_bound_ms: TotalMs | None = None
    devices: Items[DeviceProgram]
    links: dict[str, Texts] | None = None
    ops: Items[TimedOp] | None = None

    @classmethod
    def of(cls, schedule: Schedule, status: Found = "feasible", lower_bound_ms: float | None = None) -> ScheduleFile:
        """Simulates the schedule and writes down all of it."""
        return cls(
            problem=schedule.problem,
            problem_sha256=schedule.problem.sha256,
            placement=schedule.placement,
            method=schedule.method,
            status=status,
            makespan_ms=schedule.makespan_ms,
            span_ms=schedule.span_ms,
            lower_bound_ms=lower_bound_ms,
            devices=tuple(DeviceProgram(program=tuple(program.texts())) for program in schedule.programs),
            links={link: tuple(order.texts()) for link, order in schedule.links.items()} or None,
            ops=tuple(TimedOp.model_construct(**op) for op in timed_ops(schedule)),
        )

    def schedule(self) -> Schedule:
        """The schedule in it; raises `InputError` for an op that cannot be read."""
        return Schedule.parse(
            self.problem, (device.program for device in self.devices), self.links, self.method, self.placement
        )

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json", exclude_none=True), separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        write_file(path, self.to_json() + "\n")

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "schedule") -> ScheduleFile:
        """Reads a document; raises `InputError` for a wrong field and for a hash that is not the problem's."""
        try:
            file = cls.model_validate_json(text)
        except ValidationError as error:
            raise input_error(error, what) from None
        if file.problem_sha256 not in (None, file.problem.sha256):
            raise InputError(
                f"{what}: problem_sha256 = {file.problem_sha256!r}: the problem in the file has {file.problem.sha256!r}"
            )
        return file

    @classmethod
    def load(cls, path: str | Path) -> ScheduleFile:
        return cls.from_json(read_file(path), str(path))


def timed_ops(schedule: Schedule) -> list[dict[str, Any]]:
    """Every op that takes time with its nominal start and end, ordered by start; `part` where the stage has several."""
    timeline, parts = schedule.timeline, schedule.problem.costs.parts
    table = timeline.table
    shown = np.flatnonzero(~of_kinds(table, *MARKS))
    shown = shown[np.argsort(timeline.start[shown], kind="stable")]
    return [
        {
            "kind": Kind(row[KIND]).name,
            "stage": row[STAGE],
            "microbatch": row[MICROBATCH],
            **({"part": row[PART]} if row[KIND] in (Kind.O, Kind.R) and parts[row[STAGE]] > 1 else {}),
            "start_ms": start,
            "end_ms": end,
        }
        for row, start, end in zip(
            table[shown].tolist(), timeline.start[shown].tolist(), timeline.end[shown].tolist(), strict=True
        )
    ]
