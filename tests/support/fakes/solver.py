"""Stands in for the solver, for the problems of `support.problems.chain`; the request's method says what it does.

It writes the frames of `optpipe.process.child` as plain JSON and imports slow modules only if it needs them, because
tests start hundreds of it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

STEP_S = {"steps": 0.03, "slow steps": 0.5}
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def end_with_parent() -> None:
    """End when standard input closes."""
    while os.read(0, 65536):
        pass
    with suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def frame(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def incumbent(method: str, programs: list[str]) -> None:
    frame(type="incumbent", method=method, schedule={"programs": programs})


def bound(problem: dict[str, Any], share: float = 1.0) -> None:
    """Write a bound: a share of the makespan of all forwards, then all backwards, which is the shortest there is."""
    from optpipe.model.problem import Problem
    from support.problems.chain import gpipe  # here, for it takes a while

    frame(type="bound", method="fake", lower_bound_ms=share * gpipe(Problem.from_dict(problem)).makespan_ms)


def together(m: int, last: int) -> list[str]:
    """One micro-batch at a time, except the last ones: all of their forwards come before all of their backwards."""
    alone, group = range(m - last), range(m - last, m)
    return [
        " ".join([f"{s}F{j} {s}BW{j}" for j in alone] + [f"{s}F{j}" for j in group] + [f"{s}BW{j}" for j in group])
        for s in range(2)
    ]


def steps(m: int, start: list[str] | None) -> Iterator[tuple[str, list[str]]]:
    """Yield schedules from the request's warm start to the shortest one, a little better each time."""
    all_of_them = [together(m, last) for last in range(1, m + 1)]
    first = all_of_them.index(start) if start in all_of_them else 0
    for last in range(first, m):
        yield f"{last + 1} together", all_of_them[last]


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    if not os.environ.get("DEAF"):  # else it never hears that nobody wants an answer
        threading.Thread(target=end_with_parent, daemon=True).start()
    problem, method = request["problem"], request["method"]
    m = problem["microbatches"]
    if method == "crash":
        sys.exit("boom")
    if method == "silent":
        time.sleep(600)
    frame(type="ready")
    if method == "unknown":
        frame(type="refused", reason="method = 'unknown': there is none of that name")
        return
    if method == "infeasible":
        frame(type="infeasible", reason="device 0 needs 2000 bytes and has 1000")
        frame(type="end")
        return
    if method == "pid":
        print(os.getpid(), file=open(problem["name"], "w"))  # noqa: SIM115
    if method == "invalid":
        incumbent("liar", ["0F0", "1F0"])
    if method == "tells":
        limits = f"threads {request['threads']}, memory {request.get('memory_mib')}, {request['time_limit_s']:.0f} s"
        frame(type="note", text=limits)
    if method in STEP_S:
        for name, programs in steps(m, request.get("warm_start", {}).get("programs")):
            incumbent(name, programs)
            time.sleep(STEP_S[method])
        bound(problem)
        frame(type="end")
        return
    if method == "worse":
        incumbent("gpipe", together(m, m))
    incumbent("naive", together(m, 0))
    if method == "escaped":  # its own session, and it holds the pipe on which the answer is awaited
        subprocess.Popen(SLEEP, start_new_session=True, stdin=subprocess.DEVNULL)
    if method == "tree":
        for session in (False, True):
            subprocess.Popen(SLEEP, start_new_session=session, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if method in ("hang", "pid", "escaped", "tree"):
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
    incumbent("gpipe", together(m, m))
    if method == "bound":  # a little below the best there is
        bound(problem, 0.95)
        time.sleep(600)
    if method == "bounds":
        for share in (0.5, 0.5001, 0.9):
            bound(problem, share)
        time.sleep(600)
    if method == "prove":
        bound(problem)
    frame(type="end")


if __name__ == "__main__":
    main()
