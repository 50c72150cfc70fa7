"""A small timeline as StragglerAnalysis writes them, and what it was made of."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optpipe import Problem, Schedule
from optpipe.model.ops import Kind
from support import problems

NAMES = {Kind.F: "forward-compute", Kind.BW: "backward-compute"}
ORDERS = (["0F0 0F1 0BW0 0F2 0BW1 0BW2", "1F0 1BW0 1F1 1BW1 1F2 1BW2"], ["0F2 0F0 0BW2 0BW0 0F1 0BW1"] * 2)
ORDERS[1][1] = "1F2 1BW2 1F0 1BW0 1F1 1BW1"
STEPS = (16, 40)


def posed(step: int, replica: int, chunks: int = 1) -> Problem:
    """Two devices and three micro-batches that all differ, by step and replica, too."""
    stages = [
        problems.stage((0, 0, 0), device=s % 2)
        | {
            "forward_ms": [3.0 + s + j + replica for j in range(3)],
            "backward_input_ms": [5.0 + s + 2 * j + step for j in range(3)],
        }
        for s in range(2 * chunks)
    ]
    return problems.pipeline(2, 3, 100, stages, p2p_ms=0.5)


def ran(step: int, replica: int) -> Schedule:
    return problems.parsed(posed(step, replica), *ORDERS[replica])


def timeline() -> list[dict[str, Any]]:
    """Two steps of two replicas; the replicas' processes have other numbers than they have."""
    events: list[dict[str, Any]] = []
    for replica in range(2):
        pid = 7 - replica
        events.append(named("process_name", pid, 0, f"DP rank [{replica}]"))
        events += [named("thread_name", pid, 10 * d, f"PP rank {d}, TP rank 0, compute") for d in range(2)]
        events += [event for n, step in enumerate(STEPS) for event in ops(ran(step, replica), pid, step, 1e6 * n)]
    other = {**events[-1], "name": "optimizer", "args": {"step": 16, "mb_id": -1, "model_chunk": -1, "seq_id": 0}}
    return [*reversed(events), other]


def named(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}


def ops(schedule: Schedule, pid: int, step: int, begin_us: float) -> Iterator[dict[str, Any]]:
    table = schedule.timeline
    for (kind, stage, j, *_), start, end in zip(
        table.table.tolist(), table.start.tolist(), table.end.tolist(), strict=True
    ):
        device = schedule.problem.stages[stage].device
        times = {"ts": begin_us + 1e3 * start, "dur": 1e3 * (end - start)}
        args = {"step": step, "model_chunk": stage // 2, "mb_id": j, "seq_id": j}
        yield {"name": NAMES[Kind(kind)], "ph": "X", "pid": pid, "tid": 10 * device, **times, "args": args}


def saved(content: Any, folder: Path) -> Path:
    path = folder / "timeline.json"
    path.write_text(json.dumps(content))
    return path
