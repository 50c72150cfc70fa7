"""The service as a process of its own, which tests may kill or limit; with fake solvers unless told otherwise."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.processes import free_port
from support.service import client_at

START = """
import sys, optpipe_server
from optpipe import solvers
solver = solvers.installed()
database, port, solver.SEARCH, solver.FIRST = sys.argv[1:]
solver.SYSTEMS = solver.FIRST if solver.FIRST.startswith("support") else solver.SYSTEMS
settings = optpipe_server.Settings(database, open_jobs=10_000, pack=None, first_schedule_s=120.0)
optpipe_server.serve(settings, port=int(port))
"""
FAKES = ("support.fakes.solver", "support.fakes.first")
Process = tuple[subprocess.Popen[str], httpx.Client]


@contextmanager
def serve_process(
    folder: Path,
    database: str | None = None,
    port: int | None = None,
    modules: tuple[str, str] = FAKES,
    files: int | None = None,
) -> Iterator[Process]:
    """Yield the process once it answers, and a client of it; its database is by default a file in the folder.

    `modules` are those of the solver and of first schedules, `files` how many it may have open.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OPTPIPE_CACHE": str(folder / "cache.db"), "PYTHONPATH": path}
    port = port or free_port()
    arguments = (database or f"sqlite:///{folder / 'jobs.sqlite'}", str(port), *modules)
    limited = ["prlimit", f"--nofile={files}:{files}"] if files else []
    wrote = folder / "serve.log"
    with (
        wrote.open("w") as log,
        subprocess.Popen(
            [*limited, sys.executable, "-c", START, *arguments], env=env, stdout=subprocess.PIPE, stderr=log, text=True
        ) as started,
        client_at(f"http://127.0.0.1:{port}") as client,
    ):
        try:
            assert started.stdout
            assert started.stdout.readline(), f"the service ended before it answered: {wrote.read_text()}"
            yield started, client
        finally:
            started.kill()
