"""`python -m optpipe_server.comparing`: `optpipe compare` for one request, in a process that gives way to the service
and ends with it.

Reads a `Request` (`optpipe.process.child`) whose method names those to compare, with a space between them, or is empty
for all. Writes one line of JSON: what `optpipe compare --json` prints, or `{"refused": "..."}`.
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
        found = compare(
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
        print(json.dumps(found.to_dict(), separators=(",", ":")))


if __name__ == "__main__":
    main()
