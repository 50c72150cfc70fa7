"""The process of `optpipe worker`, on any machine that reaches the database."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from optpipe.errors import InputError
from optpipe_server.compiler import Compiler
from optpipe_server.database import AwayError, Database
from optpipe_server.metrics import REGISTRY
from optpipe_server.service_cache import ServiceCache
from optpipe_server.settings import Settings
from optpipe_server.work import make_worker
from optpipe_server.work.solves import Solves

log = structlog.get_logger("optpipe.work")

RETRY_S = 2.0  # between attempts to reach a database that is not there at the start
POLL_S = 0.1  # how soon a signal is seen
STOPPING_S = 5.0  # for jobs to be given back


def work(settings: Settings, name: str, metrics_host: str = "127.0.0.1", metrics_port: int | None = None) -> None:
    """Solve jobs until SIGTERM or SIGINT, then give them back. Waits for a database that is away, at any time.

    The database and the logs call the worker by its name. On the metrics' port, if there is one, `/metrics` and
    `/healthz` are answered. Raises `InputError` if the database is SQLite, whose only process is `optpipe serve`, or a
    setting is wrong.
    """
    if settings.database.startswith("sqlite"):
        raise InputError(
            f"database = {settings.database!r}: a worker shares it with other processes, but a SQLite file "
            "has one that writes, `optpipe serve`; expected postgresql://USER:PASSWORD@HOST/NAME"
        )
    if settings.solves < 1:
        raise InputError(f"solves = {settings.solves}: must be 1 or more")
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT of a background job: it stays ignored
            signal.signal(number, lambda number, _frame: came.append(number))
    database = _opened(settings.database, lambda: bool(came))
    if database is None:
        return
    worker, compiler = make_worker(settings, database, ServiceCache(settings, database), name), Compiler()
    with closing(database), _answering(worker.solves, metrics_host, metrics_port):
        compiler.start()
        worker.start()
        log.info("works", worker=name, solves=settings.solves, threads=settings.threads)
        while not came:
            time.sleep(POLL_S)
        compiler.stop()
        worker.stop(STOPPING_S)
    log.info("ended", worker=name)


def _opened(url: str, ended: Callable[[], bool]) -> Database | None:
    """Open the database as soon as it is there; None if the process has to end first."""
    while not ended():
        try:
            return Database(url)
        except AwayError as error:
            log.warning("waiting for the database", error=str(error))
        until = time.monotonic() + RETRY_S
        while not ended() and time.monotonic() < until:
            time.sleep(POLL_S)
    return None


class _Quiet(WSGIRequestHandler):
    timeout = 5  # s, for clients that connect and send nothing

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _answering(solves: Solves, host: str, port: int | None) -> Iterator[None]:
    """Answer `/metrics` and `/healthz` on that port, if there is one."""
    if port is None:
        yield
        return
    metrics = make_wsgi_app(REGISTRY)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] != "/healthz":
            return metrics(environ, start_response)
        health = solves.health()
        status = "200 OK" if health["status"] == "ok" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(health).encode()]

    try:
        server = make_server(host, port, answer, ThreadingWSGIServer, _Quiet)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"metrics_host = {host!r}, metrics_port = {port}: {why or error}") from None
    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics", port=server.server_port)
        yield
        server.shutdown()
