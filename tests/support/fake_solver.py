"""A solver that does what the method of the request says, in a process like the real one."""

from __future__ import annotations

import os
import sys
import time

from optpipe.child import Bound, End, Incumbent, Infeasible, Programs, read_request, write_frame
from optpipe.schedule import Schedule
from support.chain import gpipe, one_by_one


def write(schedule: Schedule) -> None:
    write_frame(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))


def main() -> None:
    request = read_request()
    problem, method = request.problem, request.method
    if method == "crash":
        sys.exit("boom")
    if method == "silent":
        time.sleep(600)
    if method == "infeasible":
        write_frame(Infeasible(reason="device 0 needs 2000 bytes and has 1000"))
        write_frame(End())
        return
    if method == "pid":
        print(os.getpid(), file=open(problem.name, "w"))  # noqa: SIM115
    if method == "invalid":
        write_frame(Incumbent(method="liar", schedule=Programs(programs=("0F0", "1F0"))))
    write(one_by_one(problem))
    if method in ("hang", "pid"):
        time.sleep(600)
    if method == "garbage":
        print("{not a frame")
        return
    if method == "crash later":
        os.abort()
    if method == "slow":
        time.sleep(0.3)
    write(gpipe(problem))
    if method == "prove":
        write_frame(Bound(method="fake", lower_bound_ms=gpipe(problem).makespan_ms))
    write_frame(End())


if __name__ == "__main__":
    main()
