"""`python -m optpipe_server.compare_process`: runs `optpipe compare` for one request of the service.

Reads a `CompareRequest` (`optpipe.process.protocol`). Writes one line of JSON: what `optpipe compare --json` prints, or
`{"refused": "..."}`. It has a lower priority than the service and ends with it.
"""

from __future__ import annotations

import json
import os

from optpipe.comparison import compare
from optpipe.errors import InputError
from optpipe.process.niceness import NICER, group_as_nice
from optpipe.process.protocol import CompareRequest, read_one


def main() -> None:
    request = read_one(CompareRequest)
    os.nice(NICER)
    group_as_nice(os.getpid())
    try:
        comparison = compare(request.problem, request.methods, **request.search())
    except InputError as error:
        print(json.dumps({"refused": str(error)}))
    else:
        print(json.dumps(comparison.to_dict(), separators=(",", ":")))


if __name__ == "__main__":
    main()
