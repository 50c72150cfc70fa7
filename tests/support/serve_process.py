"""The service as a process of its own, with fake solvers, which tests may kill or limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START = """
import sys, optpipe.anytime, optpipe_server.first_schedule_process
optpipe.anytime.SOLVER = "support.fake_solver"
optpipe_server.first_schedule_process.MODULE = "support.fake_first_process"
optpipe_server.serve(optpipe_server.Settings(sys.argv[1], queue=10_000), port=int(sys.argv[2]))
"""


@contextmanager
def serve_process(database: str, port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the process; it writes a line when it answers."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OPTPIPE_CACHE": str(folder / "cache.sqlite"), "PYTHONPATH": path}
    command = [sys.executable, "-c", START, database, str(port)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            yield started
        finally:
            started.kill()
