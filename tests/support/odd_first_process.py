"""Stands in for `optpipe_solver.first` and does what the request's method says, mostly wrong."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from pydantic import ValidationError

from optpipe.model.problem import Problem
from optpipe.process import protocol
from optpipe.process.protocol import (
    Bound,
    End,
    Frame,
    Incumbent,
    Infeasible,
    Programs,
    Refused,
    Request,
    output,
    requests,
)
from optpipe.schedule import Schedule
from support.chain import chain, gpipe, one_by_one

asked = 0  # the number of the request that is answered


def write_frame(frame: Frame) -> None:
    protocol.write_frame(frame, asked)


def main() -> None:
    global asked
    late: tuple[Frame, ...] = ()  # of the request before
    while (gate := os.environ.get("ODD_FIRST_PROCESS_LOADS_UNTIL")) and not Path(gate).exists():
        time.sleep(0.02)
    for request in requests(Request):
        assert not isinstance(request, ValidationError)
        for frame in late:
            write_frame(frame)
        assert request.number is not None
        late, asked = (), request.number
        noted(os.getpid(), request.method)
        behave(request.method, request.problem)
        if request.method in ("talks on", "talks late"):  # at once behind its end, or when the next request has come
            more = Incumbent(method="odd", schedule=Programs.from_schedule(gpipe(request.problem)))
            frames = (Bound(method="odd", lower_bound_ms=7.0), more, End())
            write_frame(End())
            if request.method == "talks late":
                late = frames
            else:
                for frame in frames:
                    write_frame(frame)
        elif request.method != "unknown":
            write_frame(End())


def noted(pid: int, what: str) -> None:
    with Path(os.environ["ODD_FIRST_PROCESS_LOG"]).open("a") as log:
        log.write(f"{pid} {what}\n")


def found(schedule: Schedule, method: str = "odd") -> None:
    write_frame(Incumbent(method=method, schedule=Programs.from_schedule(schedule)))


def raw(*lines: bytes) -> None:
    for line in lines:
        output().write(line)
    output().flush()


def behave(method: str, problem: Problem) -> None:
    if method in ("good", "auto", "talks on", "talks late"):
        found(one_by_one(problem))
    elif method == "unknown":
        write_frame(Refused(reason="method = 'unknown': there are others"))
    elif method == "infeasible":
        write_frame(Infeasible(reason="device 0 needs 2000 bytes and has 1000"))
    elif method == "infeasible, but":
        found(one_by_one(problem))
        write_frame(Infeasible(reason="not really"))
    elif method == "greedy":  # needs more memory than there is
        found(gpipe(problem))
    elif method == "first good, then greedy":
        found(one_by_one(problem))
        found(gpipe(problem))
    elif method == "stranger":
        found(one_by_one(chain(m=problem.microbatches + 1)))
    elif method == "babbler":
        write_frame(Incumbent(method="odd", schedule=Programs(programs=("0F0 what?", "1F0"))))
    elif method == "boaster":  # a bound that its own schedule disproves
        write_frame(Bound(method="odd", lower_bound_ms=1e6))
        found(one_by_one(problem))
    elif method == "garbage":
        raw(b'{"type": "incumbent"}\n')
    elif method == "not JSON":
        raw(b"\x00\xff{{{\n" * 100)
    elif method == "half a frame":
        raw(b'{"type": "bou')
        os._exit(0)
    elif method == "gigabyte":
        raw(*[b"x" * 2**20] * 2**10)
    elif method == "endless":
        while True:
            write_frame(Bound(method="odd", lower_bound_ms=1.0))
    elif method == "dies":
        os._exit(7)
    elif method == "dies late":
        found(one_by_one(problem))
        os._exit(7)
    elif method == "hangs":
        found(one_by_one(problem))
        noted(subprocess.Popen(["sleep", "600"]).pid, "sleep")
        time.sleep(600)
    elif method == "silent":
        time.sleep(600)


if __name__ == "__main__":
    main()
