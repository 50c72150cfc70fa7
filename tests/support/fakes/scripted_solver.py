"""Stands in for the solver: the request's method says what it does, well or badly."""

import os
import sys
import time

from optpipe import Problem, Schedule
from optpipe.process.protocol import (
    Bound,
    End,
    Frame,
    Incumbent,
    Infeasible,
    Note,
    Programs,
    Ready,
    Refused,
    Request,
    output,
    read_request,
    write_frame,
)

ENDS = {"crash": 7, "crash at once": 7, "half a frame": 0}


def one_at_a_time(problem: Problem) -> Schedule:
    return _by(problem, [f"F{j} B{j} W{j}" for j in range(problem.microbatches)])


def all_forwards_first(problem: Problem) -> Schedule:
    rounds = range(problem.microbatches)
    return _by(problem, [*(f"F{j}" for j in rounds), *(f"BW{j}" for j in rounds)])


def _by(problem: Problem, steps: list[str]) -> Schedule:
    words = " ".join(steps).split()
    return Schedule.parse(problem, [[f"{d}{word}" for word in words] for d in range(len(problem.devices))])


def main() -> None:
    request = read_request(Request)
    method = request.method
    if method != "silent":
        write_frame(Ready())
    schedules = {"slow": one_at_a_time(request.problem), "fast": all_forwards_first(request.problem)}
    found = {name: Incumbent(method=name, schedule=Programs.from_schedule(each)) for name, each in schedules.items()}
    slow, fast = found["slow"], found["fast"]
    window = Note(text="milp: 1 window", method="milp", ongoing=True)
    frames: dict[str, list[Frame]] = {
        "good": [
            slow,
            Bound(method="b", lower_bound_ms=1.0),
            fast,
            Bound(method="b", lower_bound_ms=schedules["fast"].makespan_ms),
        ],
        "worse": [fast, slow],
        "infeasible": [Infeasible(reason="device 0 needs 2 bytes and has 1")],
        "unknown": [Refused(reason="method = 'unknown': the methods are good and worse")],
        "invalid": [slow, Incumbent(method="liar", schedule=Programs(programs=("0F0", ""))), Note(text="still here")],
        "ongoing": [window, Note(text="milp: 2 windows", method="milp", ongoing=True), slow],
        "reports": [window, Note(text="milp: 3 windows", method="milp"), Note(text="something else"), slow],
        **{name: [slow] for name in ("crash", "garbage", "half a frame", "close", "sleep")},
    }
    if request.warm_start is not None:
        frames["echo"] = [Incumbent(method="echo", schedule=request.warm_start)]
    for frame in frames.get(method, []):
        write_frame(frame)
    if method == "crash":
        print("something broke", file=sys.stderr)
    if method == "sleep":
        print(os.getpid(), file=sys.stderr)
    output().write({"garbage": b'{"type": "incumbent"}\n', "half a frame": b'{"type": "bou'}.get(method, b""))
    output().flush()
    if method in ENDS:
        os._exit(ENDS[method])
    if method == "close":
        os.close(output().fileno())
    if method in ("close", "sleep", "ongoing", "silent"):
        time.sleep(60)
    if method != "unknown":
        write_frame(End())


if __name__ == "__main__":
    main()
