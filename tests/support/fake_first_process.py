"""Stands in for `optpipe_solver.first` beside `fake_solver`: the request's method says what it does.

Like that it writes plain JSON and imports nothing slow: every server of a test starts one.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from typing import Any

from support.fake_solver import end_with_parent, together

FINDS_NONE = ("silent", "crash", "invalid", "later")


def answer(request: dict[str, Any]) -> None:
    def frame(**fields: Any) -> None:
        print(json.dumps({**fields, "request": request["number"]}), flush=True)

    method = request["method"]
    if method == "none":
        frame(type="refused", reason="method = 'none': the methods are others")
        return
    if method == "asleep":
        time.sleep(600)
    if method == "infeasible":
        frame(type="infeasible", reason="device 0 needs 2000 bytes and has 1000")
    elif method not in FINDS_NONE:
        programs = together(request["problem"]["microbatches"], 0)
        frame(type="incumbent", method="naive", schedule={"programs": programs})
    frame(type="end")


def main() -> None:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=end_with_parent, args=(lines.put,), daemon=True).start()
    print(json.dumps({"type": "ready"}), flush=True)
    for _ in itertools.count():
        answer(json.loads(lines.get()))


if __name__ == "__main__":
    main()
