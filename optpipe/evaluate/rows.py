"""A schedule's ops as rows of one table, and where each op stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.model.arrays import NONE, OFF_ROUTE, Flags, Ints, Table
from optpipe.model.ops import HOST_LINK, IN_PARTS, KINDS, OPTIMIZER, TRANSFERS, Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, Program, marks_of


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth
class Rows:
    """All ops, device after device in program order: the columns of the programs, (n,) each."""

    table: Table  # (n, 5)
    device: Ints  # (n,) of which program each row is

    @classmethod
    def from_programs(cls, programs: Sequence[Program]) -> Rows:
        tables = [program.table for program in programs]
        device = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        return cls(np.concatenate(tables) if tables else np.empty((0, 5), np.int32), device)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def kind(self) -> Ints:
        return self._columns[KIND]

    @property
    def stage(self) -> Ints:
        return self._columns[STAGE]

    @property
    def microbatch(self) -> Ints:
        return self._columns[MICROBATCH]

    @property
    def part(self) -> Ints:
        return self._columns[PART]

    def of_kinds(self, *kinds: Kind) -> Flags:
        """Marks the rows of these kinds."""
        marks: Flags = marks_of(*kinds)[self.kind]
        return marks

    @cached_property
    def _columns(self) -> list[Ints]:
        """The table's columns, (n,) each, in one piece of memory: they are read many times."""
        return list(np.ascontiguousarray(self.table.T, dtype=np.int64))

    @cached_property
    def first(self) -> Ints:
        """The rows of the first op of each pair; the second is the row behind it."""
        return np.flatnonzero(self.table[:, JOINED] == 1)

    @cached_property
    def second(self) -> Flags:
        """Marks the second op of each pair."""
        marks = np.zeros(len(self), np.bool_)
        marks[self.first + 1] = True
        return marks

    @cached_property
    def transfer(self) -> Flags:
        """Marks what runs beside compute: on links, and on the host."""
        return self.of_kinds(*TRANSFERS)

    @cached_property
    def on_host_link(self) -> Flags:
        """Marks the transfers that devices with one `link` share."""
        return self.of_kinds(*HOST_LINK)

    def begins(self, devices: int) -> Ints:
        """(devices + 1,) the first row of each device, and the number of rows."""
        return np.searchsorted(self.device, np.arange(devices + 1))

    def of_device(self, device: int) -> slice:
        """The rows of one device's program."""
        begin, end = np.searchsorted(self.device, [device, device + 1]).tolist()
        return slice(begin, end)

    def op(self, row: int) -> Op:
        kind, stage, microbatch, part, _ = self.table[row].tolist()
        return Op(Kind(kind), stage, microbatch, part)

    def item(self, row: int) -> Op | Pair:
        """The op of a row, or the pair that begins there."""
        return Pair(self.op(row), self.op(row + 1)) if self.table[row, JOINED] else self.op(row)

    def require_known(self, problem: Problem) -> None:
        """Raises ScheduleError for an op that this problem does not have.

        Its stage must be on the device (of A and V: on a device that evicts to it), its micro-batch must pass the
        stage, and the stage must have the part and the costs that the op needs.
        """
        if len(self) == 0:
            return

        def refuse(wrong: Flags, why: str) -> None:
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise ScheduleError(f"{self.op(row)} in the program of device {self.device[row]}: {why}")

        costs, stage, microbatch = problem.costs, self.stage, self.microbatch
        if int(self.device[-1]) >= len(problem.devices):
            raise ScheduleError(
                f"there is a program for device {self.device[-1]}, but the problem has {len(problem.devices)} devices"
            )
        refuse(stage >= len(problem.stages), f"there are {len(problem.stages)} stages")
        refuse(microbatch >= problem.microbatches, f"there are {problem.microbatches} micro-batches")
        accepting, optimizer = self.of_kinds(Kind.A, Kind.V), self.of_kinds(*OPTIMIZER)
        home = costs.device[stage]
        lacking = costs.lacks[self.kind, stage]
        refuse(lacking, f"the stage has no {' and no '.join(KINDS[self.op(int(lacking.argmax())).kind].ms)}")
        refuse(accepting & ~costs.can_evict[stage], "the stage has no evict_ms")
        refuse(accepting & (costs.peer[home] != self.device), "the stage's device has another peer")
        refuse(~accepting & (home != self.device), "the stage is on another device")
        refuse(optimizer & (microbatch > 0), "what happens once an iteration is written with micro-batch 0")
        passed = costs.before[costs.route[microbatch], stage] != OFF_ROUTE
        refuse(~optimizer & ~passed, "the micro-batch does not pass this stage")
        again = self.of_kinds(Kind.C)
        refuse(again & ~costs.can_recompute[stage], "the stage has no recompute_ms and no levels")
        refuse(again & (self.part >= costs.levels.count[stage]), "the stage has fewer levels")
        leaves, moved = costs.can_offload[stage], self.of_kinds(Kind.O, Kind.R)
        if again.any():
            level = Index(problem, self).level[stage, microbatch]
            leaves = np.where(level >= 0, costs.levels.can_offload[level, stage], leaves)
            both = "an activation is offloaded or recomputed, not both, where its level has no offload_ms"
            refuse(moved & (level >= 0) & ~leaves, both)
        refuse(moved & ~leaves, "the stage has no offload_ms")
        leaves = leaves | costs.can_evict[stage]
        refuse(self.of_kinds(Kind.D) & ~leaves, "the stage has neither offload_ms nor evict_ms")
        refuse(~again & (self.part >= costs.parts[stage]), "the stage has fewer parts")
        joined = (self.table[:, JOINED] == 1) & (problem.overlap_factor is None)
        refuse(joined, "ops run together only where the problem has overlap_factor")
        beside = (self.table[:, JOINED] == 1) | self.second
        refuse(beside & self.of_kinds(Kind.B) & (Kind.B not in problem.paired), "all-to-all is hidden in pairs with BW")


class Index:
    """Finds ops: their rows by stage and micro-batch, `NONE` where there is none."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self._rows = rows
        self._shape = (len(problem.stages), problem.microbatches, int(problem.costs.parts.max()))
        self._found: dict[Kind, Ints] = {}

    @cached_property
    def level(self) -> Ints:
        """(S, m) the level by which each activation is computed again, `NONE` where it is not. Only to be read."""
        rows, shape = np.flatnonzero(self._rows.kind == Kind.C), self._shape[:2]
        if not len(rows):
            return np.broadcast_to(np.int64(NONE), shape)
        level = np.full(shape, NONE)
        level[self._rows.stage[rows], self._rows.microbatch[rows]] = self._rows.part[rows]
        return level

    def parts(self, kind: Kind) -> Ints:
        """(S, m, parts) rows of a kind; of one that stands in no parts (S, m, 1). Only to be read."""
        if kind not in self._found:
            rows = np.flatnonzero(self._rows.kind == kind)
            shape = self._shape if kind in IN_PARTS else (*self._shape[:2], 1)
            if len(rows):
                table = np.full(shape, NONE)
                part = self._rows.part[rows] if kind in IN_PARTS else 0
                table[self._rows.stage[rows], self._rows.microbatch[rows], part] = rows
            else:
                table = np.broadcast_to(np.int64(NONE), shape)  # takes no memory, however many parts there may be
            self._found[kind] = table
        return self._found[kind]

    def moving(self, in_parts: Kind, whole: Kind) -> Ints:
        """(S, m, parts) as `parts`, where an activation that moves as a whole is a first part."""
        if whole not in self.present:
            return self.parts(in_parts)
        rows = self.parts(in_parts).copy()
        rows[:, :, :1] = np.maximum(rows[:, :, :1], self.parts(whole))
        return rows

    def rows_of(self, *kinds: Kind) -> Ints:
        """(S, m) rows of these kinds; the last one where there are several. Only to be read."""
        tables = [self.parts(kind) for kind in kinds]
        last_parts = [table[:, :, 0] if table.shape[2] == 1 else table.max(axis=2) for table in tables]
        last: Ints = last_parts[0] if len(last_parts) == 1 else np.max(last_parts, axis=0)
        return last

    @cached_property
    def present(self) -> dict[Kind, Ints]:
        """(k,) the rows of each kind that there is."""
        return {Kind(kind): np.flatnonzero(self._rows.kind == kind) for kind in np.unique(self._rows.kind).tolist()}

    def of_same_activation(self, kind: Kind, rows: Ints) -> Ints:
        """(k,) for rows of one kind, the row of another `kind` for the same stage, micro-batch and part: the last one
        where there are several, as of micro-batches for what runs once. `NONE` where there is none."""
        if kind not in self.present:
            return np.full(len(rows), NONE)
        stage, microbatch, part = (each[rows] for each in (self._rows.stage, self._rows.microbatch, self._rows.part))
        info = KINDS[Kind(int(self._rows.kind[rows[0]]))]
        if info.once:
            last: Ints = self.rows_of(kind).max(axis=1)[stage]
            return last
        if KINDS[kind].once:
            microbatch = np.zeros_like(microbatch)
        table = self.parts(kind)
        if kind in IN_PARTS and info.in_parts:
            return table[stage, microbatch, part]
        whole = self.rows_of(kind)[stage, microbatch]
        # What moves an activation as a whole has no further parts.
        return np.where(part == 0, whole, NONE) if info.in_parts and kind in TRANSFERS else whole
