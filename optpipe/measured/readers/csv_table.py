"""A table of op times, one line an op, with the names of its columns in the first line:

    stage,op,microbatch,start_ms,end_ms
    0,F,0,0.0,10.2

`duration_ms` may stand there instead of `start_ms` and `end_ms`. Further columns are `device` (default: the stage's
number), `step` and `replica` (default: 0). An op is F, B (gradient of the inputs), W (gradient of the
weights) or BW (both); in a table without W and BW, B is both.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from optpipe.errors import InputError
from optpipe.measured.events import read_pieces
from optpipe.measured.recording import MeasuredOp, Recording, RunFacts, Sample, each_once, joined
from optpipe.model.ops import Kind, Op

OPS = ("F", "B", "W", "BW")
NEEDED = ("stage", "op", "microbatch")
COLUMNS = (*NEEDED, "start_ms", "end_ms", "duration_ms", "device", "step", "replica")


class CsvTable:
    """Reads tables. Its `InputError` names the line, the column, and what would be right."""

    name = "csv"
    takes = ()

    def recognize(self, sample: Sample) -> bool:
        return sample.file.name.lower().endswith((".csv", ".csv.gz"))

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        ops = joined((str(path), _read_table("".join(read_pieces(path)), str(path))) for path in each_once(paths))
        if {each.op.kind for each in ops} != {Kind.F, Kind.B}:
            return Recording(ops)
        ops = [each._replace(op=each.op._replace(kind=Kind.BW)) if each.op.kind is Kind.B else each for each in ops]
        return Recording(ops, ("the letter B: without a W in the table, it is taken for the whole backward, BW",))


def _read_table(text: str, path: str) -> list[MeasuredOp]:
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        places = {name.strip().lower(): n for n, name in enumerate(next(lines, []))}
        missing = [name for name in NEEDED if name not in places]
        if not missing and "duration_ms" not in places:
            missing = [name for name in ("start_ms", "end_ms") if name not in places]
        if missing:
            raise InputError(
                f"{path}, line 1: no column {missing[0]}: stage, op, microbatch, start_ms, end_ms are expected"
            )
        columns = [(name, places[name]) for name in COLUMNS if name in places]  # of others a table may have many
        return [
            _measured_op(
                {name: row[n].strip() if n < len(row) else "" for name, n in columns}, f"{path}, line {lines.line_num}"
            )
            for row in lines
            if any(row)
        ]
    except csv.Error as error:
        raise InputError(f"{path}, line {lines.line_num}: no line of a table: {error}") from None


def _measured_op(row: dict[str, str], what: str) -> MeasuredOp:
    if row["op"].upper() not in OPS:
        hint = "; PyTorch's I is B here, and its B is BW" if row["op"] == "I" else ""
        raise InputError(f"{what}: op = {row['op'][:40]!r}: one of {', '.join(OPS)} is expected{hint}")
    stage = _count(row, "stage", what)
    op = Op(Kind[row["op"].upper()], stage, _count(row, "microbatch", what))
    device = _count(row, "device", what) if row.get("device") else stage
    step, replica = (_count(row, name, what) if row.get(name) else 0 for name in ("step", "replica"))
    start = _number(row, "start_ms", what) if row.get("start_ms") else None
    if row.get("duration_ms"):
        ms = _number(row, "duration_ms", what)
    else:
        ms = _number(row, "end_ms", what) - _number(row, "start_ms", what)
    if ms < 0:
        raise InputError(f"{what}: the op takes {ms:g} ms: no less than 0 is expected")
    return MeasuredOp(op, device, step, ms, start, rank=device, replica=replica)


def _count(row: dict[str, str], name: str, what: str) -> int:
    digits = row[name]
    if not digits.isdecimal() or len(digits) > 9:
        raise InputError(f"{what}: {name} = {digits[:40]!r}: a number from 0 is expected, of 9 digits at most")
    return int(digits)


def _number(row: dict[str, str], name: str, what: str) -> float:
    try:
        value = float(row.get(name) or "")
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise InputError(f"{what}: {name} = {row.get(name, '')[:40]!r}: a time in ms is expected")
    return value
