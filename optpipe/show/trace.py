"""A schedule in the Trace Event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from optpipe.model.ops import KINDS
from optpipe.show.lanes import Scheduled, blocks, memory_over_time


def trace(schedule: Scheduled) -> str:
    """The nominal timeline as JSON text. Each device is a process with a thread for compute, one for transfers, and a
    counter for memory."""
    events: list[dict[str, Any]] = []
    for pid in range(len(schedule.problem.devices)):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"device {pid}"}})
        for thread, lane in enumerate(("compute", "transfers")):
            events.append({"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": lane}})
        events += [
            {"ph": "C", "pid": pid, "name": "activation bytes", "ts": moment * 1000, "args": {"bytes": nbytes}}  # in µs
            for moment, nbytes in memory_over_time(schedule, pid)
        ]
    events += [
        {
            "ph": "X",
            "pid": block.device,
            "tid": int(block.transfer),
            "name": str(block.op),
            "cat": KINDS[block.op.kind].word,
            "ts": block.start * 1000,
            "dur": (block.end - block.start) * 1000,
        }
        for block in blocks(schedule)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
