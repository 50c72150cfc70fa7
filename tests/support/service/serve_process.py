"""The service as a process of its own, which tests may kill or limit; with fake solvers unless told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START = """
import sys, optpipe.anytime, optpipe_server.first_schedules
database, port, optpipe.anytime.SOLVER, optpipe_server.first_schedules.MODULE = sys.argv[1:]
optpipe_server.serve(optpipe_server.Settings(database, queue=10_000, pack=None), port=int(port))
"""
FAKES = ("support.fakes.solver", "support.fakes.first_process")


@contextmanager
def serve_process(
    database: str, port: int, folder: Path, modules: tuple[str, str] = FAKES
) -> Iterator[subprocess.Popen[str]]:
    """Yield the process once it answers. `modules` are those of the solver and of first schedules."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OPTPIPE_CACHE": str(folder / "cache.db"), "PYTHONPATH": path}
    command = [sys.executable, "-c", START, database, str(port), *modules]
    wrote = folder / "serve.log"
    with (
        wrote.open("w") as log,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True) as started,
    ):
        try:
            assert started.stdout
            assert started.stdout.readline(), f"the service ended before it answered: {wrote.read_text()}"
            yield started
        finally:
            started.kill()
