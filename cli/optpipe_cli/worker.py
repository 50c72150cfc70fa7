"""`optpipe worker`: a process that solves the service's jobs."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from optpipe_cli.serve import Database, LogJson, MemoryMib, Threads, with_threads


def worker(
    *,
    database: Annotated[Database, Parameter(help="PostgreSQL URL. The password may be in PGPASSWORD.")],
    solves: Annotated[int, Parameter(validator=Number(gte=1, lte=1024), help="Searches at a time.")] = 1,
    threads: Threads = None,
    memory_mib: MemoryMib = None,
    name: Annotated[str | None, Parameter(help="In the database and the logs. Default: host and process.")] = None,
    metrics_host: Annotated[str, Parameter(help="Address of /metrics and /healthz.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None, Parameter(validator=Number(gte=0, lte=65535), help="Default: not served.")
    ] = None,
    log_json: LogJson = None,
) -> None:
    """`optpipe worker`."""
    from optpipe_cli.extras import need

    need("server")
    from optpipe_server import logs
    from optpipe_server.settings import Settings
    from optpipe_server.work import default_worker_name
    from optpipe_server.work.worker import work

    logs.configure(log_json)
    settings = Settings(database, solves=solves, memory_mib=memory_mib)
    work(with_threads(settings, threads), name or default_worker_name(), metrics_host, metrics_port)
