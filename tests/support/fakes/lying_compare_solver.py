"""Stands in for the process that makes schedules to compare; not all of its schedules are valid."""

from optpipe.process.protocol import Bound, CompareRequest, End, Incumbent, Note, Programs, read_request, write_frame
from support.problems.chain import gpipe, one_by_one


def main() -> None:
    request = read_request(CompareRequest)
    write_frame(Bound(method="honest", lower_bound_ms=3.0))
    write_frame(Incumbent(method="honest", schedule=Programs.from_schedule(one_by_one(request.problem))))
    write_frame(Incumbent(method="greedy", schedule=Programs.from_schedule(gpipe(request.problem))))
    write_frame(Incumbent(method="liar", schedule=Programs(programs=("0F0", "1F0"))))
    write_frame(Incumbent(method="babbler", schedule=Programs(programs=("0F0 what?", "1F0"))))
    write_frame(Incumbent(method="stranger", schedule=Programs(programs=("7F0", "1F0"))))
    write_frame(Note(method="shy", text="not for this problem"))
    write_frame(End())


if __name__ == "__main__":
    main()
