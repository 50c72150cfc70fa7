"""Schedules, and steps that were measured, in the Trace Event format: opens in Perfetto and in chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from optpipe.model.ops import TRANSFERS, Op
from optpipe.schedule import Schedule
from optpipe.show.lanes import NAMES, blocks, memory_over_time


class Track(NamedTuple):
    """One device: its ops with start and end, and the bytes it holds from a moment on. Times are ms."""

    name: str
    spans: Iterable[tuple[Op, float, float]]
    held: Iterable[tuple[float, int]]


def trace(schedule: Schedule) -> str:
    """What is predicted, a track for each device."""
    return document(tracks(schedule))


def tracks(schedule: Schedule) -> list[Track]:
    """A track for each device."""
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in schedule.problem.devices]
    for block in blocks(schedule):
        spans[block.device].append((block.op, block.start, block.end))
    return [Track(f"device {d}", own, memory_over_time(schedule, d)) for d, own in enumerate(spans)]


def document(tracks: Iterable[Track]) -> str:
    """One process a track, a thread for its compute and one for its transfers, a counter for its memory. Times are
    microseconds there."""
    events: list[dict[str, Any]] = []
    for pid, (name, spans, held) in enumerate(tracks):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for thread, lane in enumerate(("compute", "transfers")):
            events.append({"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": lane}})
        events += [
            {"ph": "C", "pid": pid, "name": "activation bytes", "ts": moment * 1000, "args": {"bytes": nbytes}}
            for moment, nbytes in held
        ]
        events += [
            {
                "ph": "X",
                "pid": pid,
                "tid": int(op.kind in TRANSFERS),
                "name": str(op),
                "cat": NAMES[op.kind],
                "ts": start * 1000,
                "dur": (end - start) * 1000,
            }
            for op, start, end in spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
