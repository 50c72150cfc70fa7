"""Schedules written down as other programs write what they measured, with evaluations and steps that were cut off."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from optpipe import Schedule
from optpipe.formats.torch_csv import LETTER
from optpipe.model.ops import Kind, Op

STEP_MS = 1000.0  # from the start of a step to that of the next
DEVICE, HOST = "gpu_user_annotation", "user_annotation"


class Ran(NamedTuple):
    op: Op
    device: int
    step: int
    start: float
    end: float


def ran(schedule: Schedule, plan: str, ahead: float = 0.0) -> Iterator[Ran]:
    """The ops of some steps, one a letter of the plan: t a training step, e an evaluation, c a step that was cut off
    when half of its time was over. The clock of each device is `ahead` of that of the one before, in ms."""
    timeline = schedule.timeline
    for step, letter in enumerate(plan):
        columns = (timeline.table, timeline.start, timeline.end, timeline.device)
        for (kind, stage, j, *_), start, end, d in zip(*(each.tolist() for each in columns), strict=True):
            over = end > schedule.makespan_ms / 2
            if (letter == "e" and kind != Kind.F) or (letter == "c" and over):
                continue
            clock = ahead * d + STEP_MS * step
            yield Ran(Op(Kind(kind), stage, j), d, step, start + clock, end + clock)


def csv_table(schedule: Schedule, plan: str, ahead: float = 0.0) -> str:
    lines = [
        f"{op.stage},{op.kind.name},{op.microbatch},{start},{end},{device},{step}"
        for op, device, step, start, end in ran(schedule, plan, ahead)
    ]
    return "stage,op,microbatch,start_ms,end_ms,device,step\n" + "\n".join(lines)


def primus_dump(schedule: Schedule, plan: str, folder: Path, numbered: bool = True) -> Path:
    """Chunks of a device are numbered as its stages follow each other."""
    problem = schedule.problem
    devices = range(len(problem.devices))
    chunks = [list(problem.stages_on(d)) for d in devices]
    sizes = {"pp_size": len(devices), "vp_size": len(chunks[0]), "num_mbs": problem.microbatches}
    (folder / "config.json").write_text(json.dumps(sizes))
    names = {Kind.F: "fwd", Kind.B: "bwd", Kind.BW: "bwd", Kind.W: "wgrad"}
    lists = [{str(step): defaultdict[str, list[Any]](list) for step in range(len(plan))} for _ in devices]
    for op, device, step, start, end in sorted(ran(schedule, plan), key=lambda each: each.start):
        of_step, name = lists[device][str(step)], names[op.kind]
        of_step[f"{name}_start"].append(start - STEP_MS * step)
        of_step[f"{name}_end"].append(end - STEP_MS * step)
        if numbered:
            of_step[f"{name}_minibatch"].append(op.microbatch)
            of_step[f"{name}_chunk"].append(chunks[device].index(op.stage))
    for d in devices:
        steps = {step: {"fwd_start": [], "bwd_start": [], **of_step} for step, of_step in lists[d].items()}
        (folder / f"pp_rank_{d}.json").write_text(json.dumps(steps))
    return folder


def event(name: str, ts: float, dur: float, cat: str, pid: int = 0, tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}


def torch_events(schedule: Schedule, plan: str, cat: str, ahead: float = 0.0) -> list[list[dict[str, Any]]]:
    """By device, the events of `torch.profiler`: ranges on a GPU, or on a host, with one operator in each. There an
    evaluation opens ranges for its backwards, too, with no operator in them."""
    events: list[list[dict[str, Any]]] = [[] for _ in schedule.problem.devices]
    for op, device, step, start, end in ran(schedule, plan, ahead):
        name = f"PP:{op.stage}{LETTER[op.kind]}{op.microbatch}"
        events[device].append(event(name, start * 1e3, (end - start) * 1e3, cat, pid=device))
        if cat == HOST:
            events[device].append(event("aten::mm", start * 1e3, (end - start) * 1e3, "cpu_op", pid=device))
        if cat == HOST and plan[step] == "e":
            idle = name.replace("F", "B")
            ts = ((step + 0.9) * STEP_MS + ahead * device) * 1e3 + op.microbatch
            events[device].append(event(idle, ts, 1.0, cat, pid=device))
    return events


def torch_traces(events: list[list[dict[str, Any]]], folder: Path, world_size: int | None = None) -> list[Path]:
    """A file a rank."""
    paths = [folder / f"rank{rank}.json" for rank in range(len(events))]
    for rank, (path, of_rank) in enumerate(zip(paths, events, strict=True)):
        info = {"rank": rank, "world_size": world_size or len(events)}
        path.write_text(json.dumps({"distributedInfo": info, "traceEvents": of_rank}))
    return paths
