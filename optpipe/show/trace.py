"""Schedules and measured steps in the Trace Event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from optpipe.model.ops import KINDS, TRANSFERS, Op
from optpipe.show.lanes import Scheduled, blocks, memory_over_time


class Track(NamedTuple):
    """One device.

    `spans` are its ops with start and end, `held` the bytes that it holds from a moment on. Times are in ms.
    """

    name: str
    spans: Iterable[tuple[Op, float, float]]
    held: Iterable[tuple[float, int]]


def trace(schedule: Scheduled) -> str:
    """The nominal timeline of a schedule as a trace document."""
    return document(tracks(schedule))


def tracks(schedule: Scheduled) -> list[Track]:
    """The nominal timeline of a schedule, one track a device."""
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in schedule.problem.devices]
    for block in blocks(schedule):
        spans[block.device].append((block.op, block.start, block.end))
    return [Track(f"device {d}", ops, memory_over_time(schedule, d)) for d, ops in enumerate(spans)]


def document(tracks: Iterable[Track]) -> str:
    """The trace as JSON text.

    Each track is a process with a thread for compute, one for transfers, and a counter for memory. The format counts
    in microseconds.
    """
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
                "cat": KINDS[op.kind].word,
                "ts": start * 1000,
                "dur": (end - start) * 1000,
            }
            for op, start, end in spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
