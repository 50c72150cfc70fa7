"""`python -m optpipe_solver`: reads one request, writes frames (`optpipe.process.child`), and ends within the request's
time limit."""

from __future__ import annotations

import os
import threading

from optpipe.errors import InputError
from optpipe.process.child import End, Refused, read_request, write_frame
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.portfolio.placements import PlacementSearch


def main() -> None:
    request = read_request()
    try:
        search = (
            PlacementSearch(request, write_frame) if request.placements == "all" else Portfolio(request, write_frame)
        )
    except InputError as error:
        write_frame(Refused(reason=str(error)))
        return
    backstop = threading.Timer(request.time_limit_s, _end)  # a heuristic of a huge problem does not look at the clock
    backstop.daemon = True
    backstop.start()
    search.run()
    backstop.cancel()
    write_frame(End())


def _end() -> None:
    write_frame(End())
    os._exit(0)


if __name__ == "__main__":
    main()
