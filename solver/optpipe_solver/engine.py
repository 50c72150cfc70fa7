"""One engine in a process of its own: `python -m optpipe_solver.engine`, where the request's `method` names the engine.

highspy and ortools cannot live in one process (their bundled HiGHS symbols clash), so nothing but the named engine is
imported. An engine is a module or package with `applies(problem) -> bool`, which loads nothing heavy (and
`improves(problem)`, where it can do something for others, too, if it is asked for by name), and `run(request, emit)`,
which emits frames of `optpipe.process.child` and returns how many seconds of its time limit it used by its own count of
work, None where it does not count.
"""

from __future__ import annotations

import importlib
import sys

from optpipe.process.protocol import End, read_request, write_frame
from optpipe_solver.methods import ENGINES, ROBUST


def main() -> None:
    """Runs the engine that the request names; ends with an `End` frame, or at once when standard input closes."""
    request = read_request()
    if request.method not in (*ENGINES, ROBUST):
        sys.exit(f"method = {request.method!r}: the engines are {', '.join(ENGINES)}")
    spent_s = importlib.import_module(f"optpipe_solver.{request.method}").run(request, write_frame)
    write_frame(End(spent_s=spent_s))


if __name__ == "__main__":
    main()
