"""Stands in for `optpipe_solver.first` beside `fake_solver`: the request's method says what it does."""

from __future__ import annotations

import time

from pydantic import ValidationError

from optpipe.process.protocol import End, Incumbent, Infeasible, Programs, Refused, Request, requests, write_frame
from support.chain import one_by_one

FINDS_NONE = ("silent", "crash", "invalid", "later")


def main() -> None:
    for request in requests(Request):
        assert not isinstance(request, ValidationError)
        if request.method == "none":
            write_frame(Refused(reason="method = 'none': the methods are others"), request.number)
            continue
        if request.method == "asleep":
            time.sleep(600)
        if request.method == "infeasible":
            write_frame(Infeasible(reason="device 0 needs 2000 bytes and has 1000"), request.number)
        elif request.method not in FINDS_NONE:
            write_frame(Incumbent(method="naive", schedule=Programs.of(one_by_one(request.problem))), request.number)
        write_frame(End(), request.number)


if __name__ == "__main__":
    main()
