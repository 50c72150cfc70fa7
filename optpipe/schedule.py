"""`Schedule`: one program a device, for one problem, and its file; `simulate`, `certify` and `check` judge it.

They stand here, above `optpipe.evaluate`, because a schedule knows its own times and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from optpipe.errors import InputError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.effects import Certificate
from optpipe.evaluate.timeline import Timeline
from optpipe.files import write_file
from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import MARKS, OPTIMIZER, Kind
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.program import MICROBATCH, STAGE, Program, link_orders, of_kinds, parse_programs
from optpipe.model.records import Document, Items, Record, TotalMs
from optpipe.model.rules import Rules

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Found = Literal["optimal", "feasible"]
Texts = Items[str]


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order. Times and memory follow from that.

    Attributes
    ----------
    programs
        By device: its ops, in order.
    links
        By name of a link that several devices share: all transfers on it, in order.
    method
        What it comes from.
    placement
        How `problem` came from the problem that was asked about, where its stages are others.
    rules
        Of a list scheduler, from which it or one before it in the same search follows; a search may begin with them.
    """

    problem: Problem
    programs: tuple[Program, ...]
    links: Mapping[str, Program] = field(default_factory=dict)
    method: str = ""
    placement: Placement | None = None
    rules: Rules | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(
        cls,
        problem: Problem,
        programs: Iterable[Iterable[str]],
        links: Mapping[str, Iterable[str]] | None = None,
        method: str = "",
        placement: Placement | None = None,
    ) -> Schedule:
        """A schedule from op texts, such as `Schedule.parse(problem, [["0F0", "0BW0"]])`.

        Raises InputError for a text that is no op.
        """
        orders = {link: parse_programs([texts], f"links[{link!r}]")[0] for link, texts in (links or {}).items()}
        return cls(problem, parse_programs(programs, "programs"), orders, method, placement)

    @classmethod
    def in_order(cls, problem: Problem, table: Table, device: Ints | None = None, method: str = "") -> Schedule:
        """The schedule whose programs and shared links all keep one order of ops: the rows of a table (n, 5), each of a
        device (n,), by default that of its stage."""
        device = problem.costs.device[table[:, STAGE]] if device is None else device
        programs = tuple(Program(table[device == d]) for d in range(len(problem.devices)))
        return cls(problem, programs, link_orders(problem.shared_links, table, device), method)

    @cached_property
    def compiled(self) -> CompiledSchedule:
        """Everything that follows from the problem and the programs, computed once."""
        return CompiledSchedule(self.problem, self.programs, self.links)

    def on(self, problem: Problem) -> Schedule:
        """The same programs for another problem; itself where it is the same."""
        return self if problem is self.problem else replace(self, problem=problem)

    def with_tables(self, change: Callable[[Table], Table]) -> Schedule:
        """The schedule with the table (n, 5) of each program and of each link's order changed."""
        links = {link: Program(change(order.table)) for link, order in self.links.items()}
        return replace(
            self,
            programs=tuple(Program(change(program.table)) for program in self.programs),
            links={link: order for link, order in links.items() if len(order)},
        )

    def renumbered(self, problem: Problem, name: Ints) -> Schedule:
        """The same order of ops with other micro-batches: what was number j is `name[j]` of the problem."""

        def renamed(table: Table) -> Table:
            table = table.copy()
            of_microbatch = ~of_kinds(table, *OPTIMIZER)
            table[of_microbatch, MICROBATCH] = name[table[of_microbatch, MICROBATCH]]
            return table

        rules = self.rules and self.rules._replace(order=name[self.rules.order])
        return replace(self.with_tables(renamed), problem=problem, rules=rules)

    @property
    def timeline(self) -> Timeline:
        """When each op runs. Raises as `simulate` does."""
        return self.compiled.timeline

    @property
    def makespan_ms(self) -> float:
        """First start to last end."""
        return self.timeline.makespan_ms

    @property
    def span_ms(self) -> float:
        """The longest first-start-to-last-end of one device (OptPipe, Eq. 3)."""
        return self.timeline.span_ms

    def _repr_html_(self) -> str:
        """One line for a notebook."""
        size = f"{len(self.problem.devices)} devices, {self.problem.microbatches} micro-batches"
        figures = f"{self.makespan_ms:.6g} ms, bubble {self.timeline.bubble:.1%}"
        return f"<p>{escape(self.method or 'schedule')}: {size}, {figures}; <code>optpipe.plot</code> draws it</p>"

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Reads a schedule file. Raises InputError if it cannot be read or a field is wrong."""
        return ScheduleFile.load(path).schedule()

    def save(self, path: str | Path) -> None:
        """Writes a schedule file, whole or not at all."""
        ScheduleFile.from_schedule(self).save(path)


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Times every op as early as the schedule allows.

    What is left out or stands twice without anyone waiting for it is timed as it stands: `check` finds it.

    Raises ScheduleError if an op is not of this problem, or one that another op needs is missing; DeadlockError if ops
    wait for each other.
    """
    return schedule.on(problem).compiled.timeline


def certify(problem: Problem, schedule: Schedule) -> Certificate:
    """The peaks of device and host memory, whatever the clock does.

    Raises ScheduleError if the programs are not of this problem.
    """
    return schedule.on(problem).compiled.certificate


def check(problem: Problem, schedule: Schedule) -> list[str]:
    """Everything that is wrong with a schedule for a problem, one sentence each; empty if it runs and fits."""
    return schedule.on(problem).compiled.complaints


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


class ScheduleFile(Document):
    """The document. Only `problem`, `devices` and `links` decide; the times are derived again by `simulate` before
    anyone uses them. `status` and `lower_bound_ms` are claims of its writer, and prove nothing to others.

    Where `placement` is there, `problem` is the problem that was asked about with this placement.
    """

    WHAT = "schedule"

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
    def from_schedule(
        cls, schedule: Schedule, status: Found = "feasible", lower_bound_ms: float | None = None, with_ops: bool = True
    ) -> ScheduleFile:
        """Simulates the schedule and writes down all of it; the times of its ops only `with_ops`, a record each."""
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
            ops=tuple(TimedOp.model_construct(**op) for op in timed_ops(schedule)) if with_ops else None,
        )

    def schedule(self) -> Schedule:
        """The schedule in it; raises `InputError` for an op that cannot be read."""
        programs = (device.program for device in self.devices)
        return Schedule.parse(self.problem, programs, self.links, self.method, self.placement)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json", exclude_none=True), separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        write_file(path, self.to_json() + "\n")

    @classmethod
    def from_json(cls, text: str | bytes, what: str | None = None) -> ScheduleFile:
        """Reads a document; raises `InputError` for a wrong field and for a hash that is not the problem's."""
        file = super().from_json(text, what)
        if file.problem_sha256 not in (None, file.problem.sha256):
            expected = f"the problem in the file has {file.problem.sha256!r}"
            raise InputError(f"{what or cls.WHAT}: problem_sha256 = {file.problem_sha256!r}: {expected}")
        return file


def timed_ops(schedule: Schedule) -> list[dict[str, Any]]:
    """Every op that takes time with its nominal start and end, ordered by start; `part` where the stage has several, or
    several levels of a C."""
    timeline, costs = schedule.timeline, schedule.problem.costs
    several = {Kind.O: costs.parts, Kind.R: costs.parts, Kind.C: costs.levels.count}
    shown = np.flatnonzero(~timeline.rows.of_kinds(*MARKS))
    shown = shown[np.argsort(timeline.start[shown], kind="stable")]
    times = timeline.start[shown].tolist(), timeline.end[shown].tolist()
    return [
        {
            "kind": Kind(kind).name,
            "stage": stage,
            "microbatch": microbatch,
            **({"part": part} if kind in several and several[Kind(kind)][stage] > 1 else {}),
            "start_ms": start,
            "end_ms": end,
        }
        for (kind, stage, microbatch, part, _), start, end in zip(timeline.table[shown].tolist(), *times, strict=True)
    ]
