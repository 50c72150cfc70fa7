"""`TeamWorker`: solves jobs from Procrastinate's queue on PostgreSQL, as any number of workers on any machines may."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog
from procrastinate import App, JobContext, PsycopgConnector
from procrastinate.exceptions import ConnectorException, JobAborted
from procrastinate.jobs import Status

from optpipe_server.database import Database
from optpipe_server.database.engine import first_line
from optpipe_server.database.postgres import FIRST, SOLVE, arguments, enqueue_forgotten
from optpipe_server.settings import Settings
from optpipe_server.work.solves import Solves

log = structlog.get_logger("optpipe.work")

RETRY_S = 1.0  # between two attempts to reach a database that is away
POOL_S = 5.0  # how long a query waits for a connection
EVERY_2_S = "* * * * * */2"  # cron with seconds

logging.getLogger("procrastinate").setLevel(logging.CRITICAL)  # what matters is logged here


class TeamWorker:
    """Runs a Procrastinate worker in a thread. A worker that gives no sign of life for `lost_s` is lost: its jobs come
    first among those that wait for others.

    Where the database is away for longer than a query waits, searches end; they go on from their best schedules once it
    is back.
    """

    def __init__(self, settings: Settings, database: Database, solves: Solves) -> None:
        self._settings, self._database, self.solves = settings, database, solves
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="worker", daemon=True)
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.solves.start()
        self._thread.start()

    def nudge(self) -> None:
        """Procrastinate notifies its workers itself."""

    def stop(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._stopping.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.solves.stop(until)
        self._thread.join(max(0.0, until - time.monotonic()))

    async def _work(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        # Of jobs that were lost.
        self._loop.set_exception_handler(lambda _loop, context: log.debug("worker", **context))
        self._loop.set_default_executor(ThreadPoolExecutor(self.solves.most + 1, "solve"))
        away = False
        while not self._stopping.is_set():
            try:
                app = self._app()
                async with app.open_async():
                    away = False
                    await app.run_worker_async(
                        name=self.solves.name,
                        concurrency=self.solves.most,
                        delete_jobs="always",
                        shutdown_graceful_timeout=0.0,
                        install_signal_handlers=False,
                        update_heartbeat_interval=self._settings.heartbeat_s,
                        stalled_worker_timeout=self._settings.lost_s,
                    )
            except asyncio.CancelledError:
                return
            except Exception as error:
                if not away:
                    log.warning("jobs cannot be taken: the database is away", error=first_line(error))
                away = True
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(RETRY_S)

    def _enqueue_forgotten(self) -> None:
        with self._database.write() as db:
            enqueue_forgotten(db)

    def _app(self) -> App:
        """The tasks of a worker: to solve a job, and to retry those of lost workers."""
        url = self._settings.database.replace("+psycopg", "", 1)
        app = App(connector=PsycopgConnector(conninfo=url, kwargs=arguments(), min_size=1, timeout=POOL_S))

        @app.task(name=SOLVE, retry=True, pass_context=True)
        def solve(context: JobContext, job_id: str) -> None:
            begun = self.solves.begin(job_id, context.should_abort)
            if begun is not None and not self.solves.run(begun):
                raise JobAborted

        @app.periodic(cron=EVERY_2_S)
        @app.task(name="retry_lost", queueing_lock="retry_lost", lock="retry_lost", priority=FIRST)
        async def retry_lost(timestamp: int) -> None:
            own = [solve.claim.job_id for solve in self.solves.running()]  # of which this process may have slept
            for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=self._settings.lost_s):
                if job.lock not in own:
                    with suppress(ConnectorException):  # it has ended meanwhile
                        await app.job_manager.finish_job(job, Status.ABORTED, delete_job=True)
            await asyncio.to_thread(self._enqueue_forgotten)

        return app
