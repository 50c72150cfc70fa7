"""A worker with a fake solver, in a process that tests kill and stop: `python -m` this module, with URL and NAME.

On PostgreSQL it is what `optpipe worker` runs, on SQLite what works within `optpipe serve`. It also ends when its
standard input closes.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from optpipe import solvers
from optpipe.process import process_tree
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.service_cache import ServiceCache
from optpipe_server.work import make_worker
from optpipe_server.work.worker import work

LOST_S, HEARTBEAT_S = 2.0, 0.3


@dataclass
class WorkerProcess:
    """The process; its whole process tree carries `mark`."""

    process: subprocess.Popen[bytes]
    mark: str

    @property
    def children(self) -> list[int]:
        """All of its process tree but itself."""
        return [pid for pid in process_tree.members(self.mark) if pid != self.process.pid]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def worker_process(url: str, name: str, cache: Path, deaf: bool = False) -> Iterator[WorkerProcess]:
    """Yield the worker; none of its process tree is left after the block."""
    mark = process_tree.new_mark()
    environment = process_tree.environment(mark) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"DEAF": "1"} if deaf else {}
    command = [sys.executable, "-m", "support.service.worker_process", url, name, str(cache)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    worker = WorkerProcess(process, mark)
    try:
        yield worker
    finally:
        process.stdin.close()
        worker.kill()
        process_tree.end(mark)


def main(url: str, name: str, cache: str) -> None:
    solvers.installed().SEARCH = "support.fakes.solver"
    settings = Settings(
        database=url, cache=Path(cache), pack=None, solves=2, threads=2, heartbeat_s=HEARTBEAT_S, lost_s=LOST_S
    )
    if url.startswith("postgresql"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
        work(settings, name)
    else:
        database = Database(url)
        make_worker(settings, database, ServiceCache(settings, database), name).start()
        _end_with_parent()


def _end_with_parent() -> None:
    with suppress(OSError):
        os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
