"""`python -m optpipe_server.compare_process`: runs `optpipe compare` for one request of the service.

Reads a `Request` (`optpipe.process.child`) whose method lists the methods to compare, separated by spaces; an empty one
means all. Writes one line of JSON: what `optpipe compare --json` prints, or `{"refused": "..."}`. It has a lower
priority than the service and ends with it.
"""

from __future__ import annotations

import json
import os

from optpipe.comparison import compare
from optpipe.errors import InputError
from optpipe.process.niceness import NICER, group_as_nice
from optpipe.process.protocol import read_request


def main() -> None:
    request = read_request()
    os.nice(NICER)
    group_as_nice(os.getpid())
    try:
        comparison = compare(
            request.problem,
            request.method.split() or None,
            request.time_limit_s,
            threads=request.threads,
            placements=request.placements,
            memory_mib=request.memory_mib,
        )
    except InputError as error:
        print(json.dumps({"refused": str(error)}))
    else:
        print(json.dumps(comparison.to_dict(), separators=(",", ":")))


if __name__ == "__main__":
    main()
