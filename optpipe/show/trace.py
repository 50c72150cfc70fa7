"""A schedule in the Trace Event format: opens in Perfetto and in chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from optpipe.schedule import Schedule
from optpipe.show.lanes import NAMES, blocks, memory_over_time


def trace(schedule: Schedule) -> str:
    """One process a device, a thread for its compute and one for its transfers, a counter for its memory. Times are microseconds there."""
    events: list[dict[str, Any]] = []
    for device in range(len(schedule.problem.devices)):
        events.append({"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"device {device}"}})
        for thread, name in enumerate(("compute", "transfers")):
            events.append({"ph": "M", "pid": device, "tid": thread, "name": "thread_name", "args": {"name": name}})
        events += [
            {"ph": "C", "pid": device, "name": "activation bytes", "ts": moment * 1000, "args": {"bytes": held}}
            for moment, held in memory_over_time(schedule, device)
        ]
    events += [
        {
            "ph": "X",
            "pid": block.device,
            "tid": int(block.transfer),
            "name": str(block.op),
            "cat": NAMES[block.op.kind],
            "ts": block.start * 1000,
            "dur": (block.end - block.start) * 1000,
        }
        for block in blocks(schedule)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
