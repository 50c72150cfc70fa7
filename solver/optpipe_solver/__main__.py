"""`python -m optpipe_solver`: reads one request, writes frames (`optpipe.process.child`), and ends within its time."""

from __future__ import annotations

import os
import threading

from optpipe.errors import InputError
from optpipe.process.protocol import End, Refused, read_request, write_frame
from optpipe_solver.portfolio import PlacementSearch, Portfolio


def main() -> None:
    request = read_request()
    search_type = PlacementSearch if request.placements == "all" else Portfolio
    try:
        search = search_type(request, write_frame)
    except InputError as error:
        write_frame(Refused(reason=str(error)))
        return
    timer = threading.Timer(request.time_limit_s, _end)  # a heuristic of a huge problem does not look at the clock
    timer.daemon = True
    timer.start()
    search.run()
    if isinstance(search, Portfolio):
        search.look_at_other_stages()
    timer.cancel()
    write_frame(End())


def _end() -> None:
    write_frame(End())
    os._exit(0)


if __name__ == "__main__":
    main()
