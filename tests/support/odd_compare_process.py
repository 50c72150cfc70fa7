"""Stands in for `optpipe_server.compare_process`; the first method says what it does. Writes its process ids to
`ODD_COMPARE_LOG`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from optpipe.process.protocol import CompareRequest, read_one


def main() -> None:
    what = read_one(CompareRequest).methods[0]
    if what == "hangs":
        other = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(os.environ["ODD_COMPARE_LOG"]).write_text(f"{os.getpid()} {other.pid}")
        time.sleep(600)
    if what == "crashes":
        sys.exit("boom")
    if what == "babbles":
        print("{half a")


if __name__ == "__main__":
    main()
