"""A schedule in the Trace Event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from optpipe.model.ops import KINDS, Stream
from optpipe.schedule import Schedule
from optpipe.show.lanes import blocks, memory_over_time

LANES = [*(stream.value for stream in Stream), "compute, beside the op of a pair"]


def trace(schedule: Schedule) -> str:
    """The nominal timeline as JSON text. Each device is a process with a thread for each stream, one for the second ops
    of pairs, and a counter for memory.

    Times are whole ns: readers compute with these, and drop events of one thread that overlap by rounding. A thread
    with the number 0, or that of a process, would be its main thread.
    """
    events: list[dict[str, Any]] = []
    named, devices = set[tuple[int, int]](), len(schedule.problem.devices)
    for d in range(devices):
        events.append({"ph": "M", "pid": d + 1, "name": "process_name", "args": {"name": f"device {d}"}})
        for moment, nbytes in memory_over_time(schedule, d):
            counter = {"pid": d + 1, "name": "activation bytes", "ts": moment * 1000}  # in µs
            events.append({"ph": "C", **counter, "args": {"bytes": nbytes}})
    for block in blocks(schedule):
        lane = len(LANES) - 1 if block.half == "lower" else LANES.index(KINDS[block.op.kind].stream.value)
        thread = {"pid": block.device + 1, "tid": 1 + devices + block.device * len(LANES) + lane}
        if (block.device, lane) not in named:
            named.add((block.device, lane))
            events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": LANES[lane]}})
        begin, end = round(block.start * 1e6), round(block.end * 1e6)  # in ns
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", **thread, "name": str(block.op), "cat": KINDS[block.op.kind].word, **times})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
