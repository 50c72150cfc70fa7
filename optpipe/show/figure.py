"""What the interactive picture draws, as one JSON document: `web/` draws it with plotly, in a page or in a notebook."""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import InputError
from optpipe.evaluate.causes import Causes
from optpipe.evaluate.objective import gap
from optpipe.model.arrays import Ints
from optpipe.model.ops import COMPUTE, INWARD, KINDS, MARKS, Kind
from optpipe.schedule import Schedule
from optpipe.show.lanes import colour_of, darker, depths, kinds_in, memory_steps, text_colour

# Where an op lies within its device's row: over the whole compute lane, its upper or its lower half, or on the lane of
# one direction of the links or of the host.
COMPUTE_LANE, UPPER, LOWER, OUTWARD, TO_DEVICE, ON_HOST, NOWHERE = range(7)


class OpChange(IntEnum):
    """What became of an op."""

    NONE = 0  # it stands in the same order as the others that stayed
    MOVED = 1  # both schedules have it, at another place in its program
    ONLY_HERE = 2  # the other schedule does not have it on this device


def changes(schedule: Schedule, other: Schedule) -> Ints:
    """(n,) what distinguishes each op of a schedule from the other: an `OpChange`.

    Of each device as few ops as possible are called moved: those without which both programs have the same order, which
    is the longest increasing run of their places. Drops and other ops that take no time are left out.
    """
    change = np.zeros(len(schedule.timeline.rows), np.int64)
    for device in range(len(schedule.problem.devices)):
        places = {op: place for place, op in enumerate(_ops(other, device).values())}
        ops = _ops(schedule, device)
        change[[row for row, op in ops.items() if op not in places]] = OpChange.ONLY_HERE
        common = [row for row, op in ops.items() if op in places]
        kept = _longest_increasing([places[ops[row]] for row in common])
        change[[row for i, row in enumerate(common) if i not in kept]] = OpChange.MOVED
    return change


def _ops(schedule: Schedule, device: int) -> dict[int, tuple[int, ...]]:
    """The ops of one program that take time, by row. An absent device has none."""
    rows = schedule.timeline.rows
    of_device = rows.of_device(device)
    lasting = np.flatnonzero(~rows.of_kinds(*MARKS)[of_device]) + of_device.start
    return {row: tuple(op[:4]) for row, op in zip(lasting.tolist(), rows.table[lasting].tolist(), strict=True)}


def _longest_increasing(values: Sequence[int]) -> set[int]:
    """The indices of a longest increasing subsequence (Fredman 1975)."""
    tails: list[int] = []  # the last value of the best run of each length
    ends: list[int] = []  # its index
    before: list[int] = []
    for i, value in enumerate(values):
        length = bisect_left(tails, value)
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1], ends[length : length + 1] = [value], [i]
    kept, i = set(), ends[-1] if ends else -1
    while i >= 0:
        kept.add(i)
        i = before[i]
    return kept


def figure(schedule: Schedule, before: Schedule | None = None, lower_bound_ms: float | None = None) -> dict[str, Any]:
    """The document of one schedule, or of two with what changed; parameters as of `optpipe.plot`.

    Raises InputError for a schedule without ops, and as its timeline does.
    """
    if before is None:
        return side_by_side([schedule], lower_bound_ms=lower_bound_ms)
    both = [changes(before, schedule), changes(schedule, before)]
    return side_by_side([before, schedule], both, lower_bound_ms=lower_bound_ms)


def side_by_side(
    schedules: Sequence[Schedule],
    changed: Sequence[NDArray[Any] | None] = (),
    memory: bool = True,
    lower_bound_ms: float | None = None,
) -> dict[str, Any]:
    """The document of several schedules, of which a page shows one or two at a time.

    `changed` marks by schedule the ops that distinguish it from another one (`changes`). `memory` is whether there is
    something to draw of it. The bound is as of `figure`, of the last schedule.
    """
    if any(not len(each.compiled.rows) for each in schedules):
        raise InputError("the programs of a schedule are empty: there is nothing to draw")
    changed = changed or [None] * len(schedules)
    last = schedules[-1]
    return {
        "title": last.problem.name or last.method or "schedule",
        "lower_bound_ms": lower_bound_ms,
        "gap": gap(last.makespan_ms, lower_bound_ms),
        "kinds": [
            {
                "letter": kind.name,
                "name": KINDS[kind].word,
                "colour": colour_of(kind),
                "text": text_colour(colour_of(kind)),
            }
            for kind in KINDS
            if any(kind in kinds_in(each) for each in schedules)
        ],
        "letters": [kind.name for kind in Kind],
        "schedules": [_schedule(each, marks, memory) for each, marks in zip(schedules, changed, strict=True)],
    }


def _schedule(schedule: Schedule, changed: NDArray[Any] | None, memory: bool) -> dict[str, Any]:
    compiled, timeline, problem = schedule.compiled, schedule.timeline, schedule.problem
    rows, causes, certificate = timeline.rows, Causes(compiled), compiled.certificate
    colours, of_row = _colours(schedule)
    busy = np.zeros(len(problem.devices))
    alone = rows.of_kinds(*COMPUTE) & ~rows.second
    np.add.at(busy, rows.device[alone], (timeline.end - timeline.start)[alone])
    return {
        "method": schedule.method,
        "makespan_ms": timeline.makespan_ms,
        "span_ms": timeline.span_ms,
        "bubble": timeline.bubble,
        "microbatches": problem.microbatches,
        "devices": [
            {"limit": device.limit, "peak": device.bytes, "at": device.at, "host_peak": host.bytes, "busy_ms": ms}
            for device, host, ms in zip(certificate.device, certificate.host, busy.tolist(), strict=True)
        ],
        "stages": [stage.device for stage in problem.stages],
        "parts": problem.costs.parts.tolist(),
        "colours": [{"fill": colour, "text": text_colour(colour)} for colour in colours],
        "ops": {
            "kind": _array(rows.kind, "u1"),
            "stage": _array(rows.stage, "u2"),
            "microbatch": _array(rows.microbatch, "u4"),
            "part": _array(rows.part, "u1"),
            "device": _array(rows.device, "u2"),
            "lane": _array(_lanes(schedule), "u1"),
            "colour": _array(of_row, "u2"),
            "start": _array(timeline.start, "f8"),
            "end": _array(timeline.end, "f8"),
            "waited_for": _array(causes.row, "i4"),
            "cause": _array(causes.why, "u1"),
            "changed": None if changed is None else _array(changed, "u1"),
        },
        "critical_path": _array(np.array(causes.critical_path, np.int64), "i4"),
        "gaps": {
            "device": _array(causes.gaps.device, "u2"),
            "begin": _array(causes.gaps.begin_ms, "f8"),
            "end": _array(causes.gaps.end_ms, "f8"),
            "row": _array(causes.gaps.row, "i4"),
            "last": _array(causes.gaps.last, "u1"),
        },
        "ready": {
            "gap": _array(causes.ready.gap, "i4"),
            "row": _array(causes.ready.row, "i4"),
            "since": _array(causes.ready.since_ms, "f8"),
            "held": _array(causes.ready.held_bytes, "f8"),
            "hindrance": _array(causes.ready.hindrance, "u1"),
        },
        "memory": _memory(schedule) if memory else None,
    }


def _colours(schedule: Schedule) -> tuple[list[str], NDArray[Any]]:
    """The colours of a schedule's ops, and (n,) which of them each op has: by its kind and its stage's shade."""
    shades, of_stage = np.unique(depths(schedule.problem), return_inverse=True)
    rows = schedule.timeline.rows
    used, of_row = np.unique(rows.kind * len(shades) + of_stage[rows.stage], return_inverse=True)
    pairs = [divmod(code, len(shades)) for code in used.tolist()]
    return [darker(colour_of(Kind(kind)), float(shades[shade])) for kind, shade in pairs], of_row


def _lanes(schedule: Schedule) -> NDArray[Any]:
    rows = schedule.timeline.rows
    lane = np.full(len(rows), COMPUTE_LANE)
    lane[rows.first], lane[rows.second] = UPPER, LOWER
    lane[rows.transfer] = OUTWARD
    lane[rows.of_kinds(*INWARD, Kind.L)] = TO_DEVICE
    lane[rows.of_kinds(Kind.U)] = ON_HOST
    lane[rows.of_kinds(*MARKS)] = NOWHERE
    return lane


def _memory(schedule: Schedule) -> dict[str, Any]:
    """All devices' steps one after another; those of device d are from `begins[d]` to `begins[d + 1]`."""
    steps = [memory_steps(schedule, device) for device in range(len(schedule.problem.devices))]
    begins = np.cumsum([0, *(len(moments) for moments, _ in steps)])
    return {
        "begins": _array(begins, "u4"),
        "moment": _array(np.concatenate([moments for moments, _ in steps]), "f8"),
        "bytes": _array(np.concatenate([held for _, held in steps]), "f8"),
    }


def _array(values: NDArray[Any], code: str) -> dict[str, str]:
    """An array as the page reads it into a typed one: its type and its bytes, little-endian."""
    return {"type": code, "base64": base64.b64encode(values.astype(f"<{code}").tobytes()).decode()}
