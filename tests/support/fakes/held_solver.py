"""The real solver, held back: a search by `auto` begins once the file `HELD_UNTIL` of the environment is there, and
ends with the first schedule that is shorter than the one it starts from, or after `SEARCH_S`."""

import os
import time
from pathlib import Path

from optpipe.process.protocol import End, Frame, Incumbent, Request, read_request, write_frame

SEARCH_S = 60.0  # once it begins: there may be nothing shorter


def main() -> None:
    request = read_request(Request)
    gate = Path(os.environ["HELD_UNTIL"])
    while request.method == "auto" and not gate.exists():
        time.sleep(0.05)

    from optpipe_solver import __main__ as solver  # not before, for one that is killed needs none of it

    request = request.model_copy(update={"time_limit_s": min(request.time_limit_s, SEARCH_S)})
    start = request.warm_start and request.warm_start.schedule(request.problem, "")

    def write(frame: Frame) -> None:
        write_frame(frame)
        if isinstance(frame, Incumbent) and start:
            found = frame.schedule.schedule(request.problem, frame.method)
            if found.makespan_ms < start.makespan_ms:
                write_frame(End())
                os._exit(0)

    solver.read_request, solver.write_frame = lambda _: request, write
    solver.main()


if __name__ == "__main__":
    main()
