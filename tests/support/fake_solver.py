"""A solver that does what the method of the request says, in a process like the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from optpipe.child import Bound, End, Incumbent, Infeasible, Note, Programs, Refused, Request, read_request, write_frame
from optpipe.schedule import Schedule
from support.chain import gpipe, one_by_one, step_by_step

STEP_S = 0.03
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def write(schedule: Schedule) -> None:
    write_frame(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))


def main() -> None:
    request = deaf_request() if os.environ.get("DEAF") else read_request()
    problem, method = request.problem, request.method
    if method == "crash":
        sys.exit("boom")
    if method == "silent":
        time.sleep(600)
    if method == "unknown":
        write_frame(Refused(reason="method = 'unknown': there is none of that name"))
        return
    if method == "infeasible":
        write_frame(Infeasible(reason="device 0 needs 2000 bytes and has 1000"))
        write_frame(End())
        return
    if method == "pid":
        print(os.getpid(), file=open(problem.name, "w"))  # noqa: SIM115
    if method == "invalid":
        write_frame(Incumbent(method="liar", schedule=Programs(programs=("0F0", "1F0"))))
    if method == "tells":
        write_frame(Note(text=f"threads {request.threads}, memory {request.memory_mib}, nice {os.nice(0)}, {request.time_limit_s:.0f} s"))
    if method == "steps":
        for schedule in better(request):
            write(schedule)
            time.sleep(STEP_S)
        write_frame(Bound(method="fake", lower_bound_ms=gpipe(problem).makespan_ms))
        write_frame(End())
        return
    if method == "worse":
        write(gpipe(problem))
    write(one_by_one(problem))
    if method == "escaped":  # its own session, and it holds the pipe on which the answer is awaited
        subprocess.Popen(SLEEP, start_new_session=True, stdin=subprocess.DEVNULL)
    if method == "family":
        for session in (False, True):
            subprocess.Popen(SLEEP, start_new_session=session, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if method in ("hang", "pid", "escaped", "family"):
        time.sleep(600)
    if method == "bomb":
        held = []
        while True:
            held.append(bytearray(os.urandom(2**20)) * 16)
    if method == "garbage":
        print("{not a frame")
        return
    if method == "half a frame":
        sys.stdout.write('{"type": "bou')
        return
    if method == "endless line":
        while True:
            sys.stdout.write(" " * 2**20)
    if method == "crash later":
        os.abort()
    if method == "slow":
        time.sleep(0.3)
    write(gpipe(problem))
    if method == "bound":  # a little below the best there is
        write_frame(Bound(method="fake", lower_bound_ms=0.95 * gpipe(problem).makespan_ms))
        time.sleep(600)
    if method == "prove":
        write_frame(Bound(method="fake", lower_bound_ms=gpipe(problem).makespan_ms))
    write_frame(End())


def deaf_request() -> Request:
    """Without ever hearing that nobody wants an answer."""
    return Request.model_validate_json(sys.stdin.buffer.readline())


def better(request: Request) -> Iterator[Schedule]:
    """From where the request starts to the shortest, a little at a time."""
    start = request.warm_start.schedule(request.problem, "") if request.warm_start else None
    for schedule in step_by_step(request.problem):
        if start is None or schedule.makespan_ms < start.makespan_ms:
            yield schedule


if __name__ == "__main__":
    main()
