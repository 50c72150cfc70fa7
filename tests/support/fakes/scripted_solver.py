"""Stands in for the solver: the request's method says what it does, well or badly."""

from __future__ import annotations

import os
import sys
import time

from optpipe import Problem, Schedule
from optpipe.process.protocol import (
    Bound,
    End,
    Incumbent,
    Infeasible,
    Note,
    Programs,
    Refused,
    output,
    read_request,
    write_frame,
)


def one_at_a_time(problem: Problem) -> Schedule:
    return _by(problem, [f"F{j} B{j} W{j}" for j in range(problem.microbatches)])


def all_forwards_first(problem: Problem) -> Schedule:
    rounds = range(problem.microbatches)
    return _by(problem, [*(f"F{j}" for j in rounds), *(f"BW{j}" for j in rounds)])


def _by(problem: Problem, steps: list[str]) -> Schedule:
    words = " ".join(steps).split()
    return Schedule.parse(problem, [[f"{d}{word}" for word in words] for d in range(len(problem.devices))])


def main() -> None:
    request = read_request()

    def found(schedule: Schedule, method: str) -> None:
        write_frame(Incumbent(method=method, schedule=Programs.from_schedule(schedule)))

    slow, fast = one_at_a_time(request.problem), all_forwards_first(request.problem)
    if request.method == "good":
        found(slow, "slow")
        write_frame(Bound(method="b", lower_bound_ms=1.0))
        found(fast, "fast")
        write_frame(Bound(method="b", lower_bound_ms=fast.makespan_ms))
    elif request.method == "worse":
        found(fast, "fast")
        found(slow, "slow")
    elif request.method == "infeasible":
        write_frame(Infeasible(reason="device 0 needs 2 bytes and has 1"))
    elif request.method == "unknown":
        write_frame(Refused(reason="method = 'unknown': the methods are good and worse"))
        return
    elif request.method == "invalid":
        found(slow, "slow")
        found(Schedule.parse(request.problem, [["0F0"], []]), "liar")
        write_frame(Note(text="still here"))
    elif request.method == "crash":
        found(slow, "slow")
        print("something broke", file=sys.stderr)
        os._exit(7)
    elif request.method == "crash at once":
        os._exit(7)
    elif request.method == "garbage":
        found(slow, "slow")
        output().write(b'{"type": "incumbent"}\n')
        output().flush()
    elif request.method == "half a frame":
        found(slow, "slow")
        output().write(b'{"type": "bou')
        output().flush()
        os._exit(0)
    elif request.method == "close":
        found(slow, "slow")
        os.close(output().fileno())
        time.sleep(60)
    elif request.method == "sleep":
        found(slow, "slow")
        print(os.getpid(), file=sys.stderr)
        time.sleep(60)
    elif request.method == "ongoing":
        write_frame(Note(text="milp: 1 window", method="milp", ongoing=True))
        write_frame(Note(text="milp: 2 windows", method="milp", ongoing=True))
        found(slow, "slow")
        time.sleep(60)
    elif request.method == "reports":
        write_frame(Note(text="milp: 1 window", method="milp", ongoing=True))
        write_frame(Note(text="milp: 3 windows", method="milp"))
        write_frame(Note(text="something else"))
        found(slow, "slow")
    elif request.method == "silent":
        time.sleep(60)
    elif request.method == "echo":
        assert request.warm_start is not None
        found(request.warm_start.schedule(request.problem, ""), "echo")
    write_frame(End())


if __name__ == "__main__":
    main()
