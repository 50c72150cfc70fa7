"""Stands in for `optpipe_server.own_process`: it refuses a diagnosis; a comparison's first method says what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    request = json.loads(sys.stdin.readline())
    method = (request.get("methods") or [""])[0]
    if sys.argv[1] == "diagnose":
        print('{"refused":"no trace"}')
    elif method == "hangs":
        other = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(os.environ["OWN_PROCESS_LOG"]).write_text(f"{os.getpid()} {other.pid}")
        time.sleep(600)
    elif method == "crashes":
        sys.exit("boom")
    elif method == "babbles":
        print("{half a")
    else:
        print('{"problem":"","options":{},"k":[],"rows":[]}')


if __name__ == "__main__":
    main()
