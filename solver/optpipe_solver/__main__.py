"""`python -m optpipe_solver`: reads one request, writes frames (`optpipe.process.child`), and ends within its time."""

from __future__ import annotations

import os
import threading

from optpipe.errors import InputError
from optpipe.process.protocol import End, Ready, Refused, Request, read_request, write_frame
from optpipe_solver.portfolio import PlacementSearch, Portfolio, offer_remedies


def main() -> None:
    request = read_request(Request)
    search_type = PlacementSearch if request.placements == "all" else Portfolio
    try:
        search = search_type(request, write_frame)
    except InputError as error:
        write_frame(Refused(reason=str(error)))
        return
    begun = threading.Event()
    timer = threading.Timer(request.time_limit_s, _end, (begun,))  # a heuristic of a huge problem reads no clock
    timer.daemon = True
    timer.start()
    search.begin()  # however late that is on a busy machine
    if isinstance(search, Portfolio):
        search.look_at_other_stages()
    write_frame(Ready())
    begun.set()
    search.run()
    if search.is_infeasible:
        offer_remedies(request, write_frame, search.clock)
    timer.cancel()
    write_frame(End())


def _end(begun: threading.Event) -> None:
    begun.wait()
    write_frame(End())
    os._exit(0)


if __name__ == "__main__":
    main()
