"""`python -m optpipe_solver.engine`: runs one engine, which the request's `method` names.

Ends with an `End` frame, or at once when standard input closes.
"""

from __future__ import annotations

import sys

from optpipe.process.protocol import End, read_request, write_frame
from optpipe_solver import engines
from optpipe_solver.methods import ENGINES


def main() -> None:
    request = read_request()
    if request.method not in ENGINES:
        sys.exit(f"method = {request.method!r}: the engines are {', '.join(ENGINES)}")
    write_frame(End(spent_s=engines.load(request.method).run(request, write_frame)))


if __name__ == "__main__":
    main()
