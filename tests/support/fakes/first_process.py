"""Stands in for `optpipe_solver.first`, for the problems of `support.problems.chain`; the request's method says what
it does.

Like `fakes.solver` it writes plain JSON and imports nothing slow: every server of a test starts one. With the
environment's `FIRST_LOG` it lists its process id and what it is asked; it is ready once the file `FIRST_GATE` is there.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from support.fakes.solver import end_with_parent, together

FINDS_NONE = ("silent", "crash", "invalid", "later", "dies", "half a frame", "not JSON", "gigabyte", "endless")
HALF = '{"type": "bou'


def bound(ms: float) -> dict[str, Any]:
    return {"type": "bound", "method": "fake", "lower_bound_ms": ms}


def infeasible(reason: str) -> dict[str, Any]:
    return {"type": "infeasible", "reason": reason}


def incumbent(programs: list[str], method: str = "naive") -> dict[str, Any]:
    return {"type": "incumbent", "method": method, "schedule": {"programs": programs}}


END = {"type": "end"}


def frames(method: str, m: int) -> list[dict[str, Any]]:
    """What it finds for m micro-batches, until its end."""
    good, greedy = incumbent(together(m, 0)), incumbent(together(m, m))  # the second may need too much memory
    return {
        "infeasible": [infeasible("device 0 needs 2000 bytes and has 1000")],
        "infeasible, but": [good, infeasible("not really")],
        "greedy": [greedy],
        "first good, then greedy": [good, greedy],
        "stranger": [incumbent(together(m + 1, 0))],
        "babbler": [incumbent(["0F0 what?", "1F0"])],
        "boaster": [bound(1e6), good],  # a bound that its own schedule disproves
        "garbage": [{"type": "incumbent"}],
    }.get(method, [] if method in FINDS_NONE else [good])


def note(pid: int, what: str) -> None:
    if log := os.environ.get("FIRST_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{pid} {what}\n")


def main() -> None:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=end_with_parent, args=(lines.put,), daemon=True).start()
    while (gate := os.environ.get("FIRST_GATE")) and not Path(gate).exists():
        time.sleep(0.02)
    print(json.dumps({"type": "ready"}), flush=True)
    late: list[str] = []  # lines that answer the request before
    while True:
        request = json.loads(lines.get())
        method, m = request["method"], request["problem"]["microbatches"]
        for line in late:
            print(line, flush=True)
        note(os.getpid(), method)
        late = answer(method, m, request["number"])


def answer(method: str, m: int, number: int) -> list[str]:
    """Answer a request; return the lines that come once there is another one."""

    def line(frame: dict[str, Any]) -> str:
        return json.dumps({**frame, "request": number})

    if method == "none":
        print(line({"type": "refused", "reason": "method = 'none': the methods are others"}), flush=True)
        return []
    if method == "asleep":
        time.sleep(600)
    for frame in frames(method, m):
        print(line(frame), flush=True)
    if method == "hangs":
        note(subprocess.Popen(["sleep", "600"]).pid, "sleep")
        time.sleep(600)
    if method in ("dies", "dies late", "half a frame"):
        sys.stdout.write(HALF if method == "half a frame" else "")
        sys.stdout.flush()
        os._exit(7)
    if method == "not JSON":
        print("{{{\n" * 100, flush=True)
    while method == "endless":
        print(line(bound(1.0)), flush=True)
    for _ in range(2**10 if method == "gigabyte" else 0):
        sys.stdout.write("x" * 2**20)
    print(line(END), flush=True)
    more = [line(each) for each in (bound(7.0), incumbent(together(m, m)), END)]
    if method == "talks on":
        print("\n".join(more), flush=True)
    return more if method == "talks late" else []


if __name__ == "__main__":
    main()
