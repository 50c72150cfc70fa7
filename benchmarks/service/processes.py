"""The service's own commands as processes, with as many keys as the load needs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from optpipe.errors import InputError, OptPipeError
from optpipe_server.database import Database, Jobs
from optpipe_server.database.keys import SCOPES, Keys

STARTS_S = 60.0
ENDS_S = 15.0


class Process:
    """One process of the service. Its stderr goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log

    @classmethod
    async def start(cls, folder: Path, name: str, *arguments: str, **variables: str) -> Process:
        log = folder / f"{name}.log"
        with log.open("ab") as errors:
            command = [sys.executable, "-m", "optpipe_cli", *arguments]
            environment = {**os.environ, "OPTPIPE_CACHE": str(folder / "cache.sqlite"), **variables}
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def says(self) -> str:
        """Return the next line on stdout. Raises `OptPipeError` if the process ends instead."""
        assert self._process.stdout is not None
        async with asyncio.timeout(STARTS_S):
            line = await self._process.stdout.readline()
        if not line:
            raise OptPipeError("a process of the service has ended")
        return line.decode().strip()

    async def kill(self) -> None:
        """End it by kill -9."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def end(self, limit_s: float) -> int:
        """Ask it to end; return its exit status. Raises `TimeoutError`."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(limit_s):
            return await self._process.wait()

    async def gone(self) -> None:
        """Make sure that it has ended, by SIGTERM if possible."""
        try:
            await self.end(ENDS_S)
        finally:
            await self.kill()


class Deployment:
    """The service on this machine: one process with SQLite, an API and workers with PostgreSQL."""

    def __init__(self, folder: Path, url: str, keys: int, threads: int) -> None:
        self.folder, self.url, self._threads = folder, url, threads
        self.sqlite = url.startswith("sqlite")
        self.keys = _keys(url, keys)
        self.workers: list[Process] = []
        self._port = 0
        self._api: Process | None = None

    @property
    def api(self) -> Process:
        assert self._api is not None
        return self._api

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *([self._api] if self._api else [])]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    async def serve(self) -> None:
        """Start the API; return once it answers. Started again, it keeps its address."""
        solving = ("--threads", str(self._threads)) if self.sqlite else ("--solves", "0")
        self._api = await Process.start(
            self.folder, "api", "serve", "--database", self.url, "--port", str(self._port), *solving
        )
        self._port = int((await self._api.says()).rsplit(":", 1)[1])

    async def work(self) -> None:
        """Start one more worker."""
        worker = await Process.start(
            self.folder, f"worker{len(self.workers)}", "worker", "--database", self.url, "--threads", str(self._threads)
        )
        self.workers.append(worker)


def _keys(url: str, count: int) -> Sequence[str]:
    """Create keys. Raises `InputError` for a database with jobs in it."""
    database = Database(url)
    try:
        if any(Jobs(database).count().values()):
            raise InputError("database: it has jobs; expected an empty one")
        keys = Keys(database)
        return [keys.create(f"bench{number}", SCOPES) for number in range(count)]
    finally:
        database.close()


@asynccontextmanager
async def deployment(folder: Path, url: str, keys: int, threads: int) -> AsyncIterator[Deployment]:
    """Yield the service, started with one worker; it has ended after the block."""
    deployed = Deployment(folder, url, keys, threads)
    try:
        await deployed.serve()
        if not deployed.sqlite:
            await deployed.work()
        yield deployed
    except OptPipeError as error:
        said = "".join(process.log.read_text(errors="replace")[-2000:] for process in deployed.processes)
        raise OptPipeError(f"{error}; the service said: {said or 'nothing'}") from None
    finally:
        await asyncio.gather(*(process.gone() for process in deployed.processes))
