"""`optpipe worker`: a supervisor in a process of its own, on any machine that reaches the database."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import make_wsgi_app

from optpipe.errors import InputError
from optpipe_server.caches import Caches
from optpipe_server.database import AwayError, Database
from optpipe_server.metrics import REGISTRY
from optpipe_server.settings import Settings
from optpipe_server.work import Reaper, Supervisor

log = structlog.get_logger("optpipe.work")

AGAIN_S = 2.0  # between attempts to reach a database that was not there at the start
LOOK_S = 0.1  # how soon a signal is seen

Ended = Callable[[], bool]


def work(settings: Settings, name: str, metrics_host: str = "127.0.0.1", metrics_port: int | None = None) -> None:
    """Works until SIGTERM or SIGINT, then hands its jobs back. A database that is away is waited for, now and later.

    With `metrics_port`, Prometheus finds `/metrics` there, and whoever minds the process `/healthz`.
    Raises `InputError` for SQLite, whose one process is `optpipe serve`, and for what else cannot be.
    """
    if settings.database.startswith("sqlite"):
        raise InputError(
            f"database = {settings.database!r}: a worker shares it with other processes, and SQLite has one that "
            "writes, `optpipe serve`; "
            "postgresql://USER:PASSWORD@HOST/NAME would be right"
        )
    if settings.solves < 1:
        raise InputError(f"solves = {settings.solves}: must be 1 or more")
    with _told_to_end() as ended:
        database = _opened(settings.database, ended)
        if database is None:
            return
        supervisor = Supervisor(settings, database, Caches(settings, database), name)
        reaper = Reaper(database, supervisor.held)
        with closing(database), _answering(supervisor, metrics_host, metrics_port):
            reaper.start()
            supervisor.start()
            log.info("works", worker=name, solves=settings.solves, threads=settings.threads)
            while not ended():
                time.sleep(LOOK_S)
            supervisor.stop()
            reaper.stop()
        log.info("ended", worker=name)


@contextmanager
def _told_to_end() -> Iterator[Ended]:
    """Whether one of the signals came. A signal that is ignored, such as SIGINT of a background job, stays so."""
    came: list[int] = []
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _opened(url: str, ended: Ended) -> Database | None:
    """The database, as soon as it is there; None where the end comes first."""
    while not ended():
        try:
            return Database(url)
        except AwayError as error:
            log.warning("waiting for the database", error=str(error))
        until = time.monotonic() + AGAIN_S
        while not ended() and time.monotonic() < until:
            time.sleep(LOOK_S)
    return None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 5  # for one who connects and says nothing

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _answering(supervisor: Supervisor, host: str, port: int | None) -> Iterator[None]:
    """`/metrics` and `/healthz` on that port, if there is one."""
    if port is None:
        yield
        return
    metrics = make_wsgi_app(REGISTRY)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] != "/healthz":
            return metrics(environ, start_response)
        health = supervisor.health()
        start_response(
            "200 OK" if health["status"] == "ok" else "503 Service Unavailable", [("Content-Type", "application/json")]
        )
        return [json.dumps(health).encode()]

    try:
        server = make_server(host, port, answer, _Server, _Quiet)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"metrics_host = {host!r}, metrics_port = {port}: {why or error}") from None
    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics", port=server.server_port)
        yield
        server.shutdown()
