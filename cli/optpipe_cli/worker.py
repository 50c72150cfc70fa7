"""`optpipe worker`: a process that solves the service's jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from optpipe_cli.serve import LogJson, MemoryMib, Threads, with_threads


def worker(
    database: Annotated[
        str, typer.Option(envvar="OPTPIPE_DATABASE", help="PostgreSQL URL. The password may be in PGPASSWORD.")
    ],
    solves: Annotated[int, typer.Option(min=1, max=1024, help="Searches at a time.")] = 1,
    threads: Threads = None,
    memory_mib: MemoryMib = None,
    name: Annotated[
        str | None, typer.Option(help="Name in the database and the logs. Default: host and process id.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of /metrics and /healthz.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of /metrics and /healthz; 0 takes a free one. Default: not served."),
    ] = None,
    log_json: LogJson = None,
) -> None:
    """Solve jobs of a service whose database is PostgreSQL, until told to end."""
    from optpipe_cli.extras import need

    need("server")
    from optpipe_server import logs
    from optpipe_server.settings import Settings
    from optpipe_server.work import default_worker_name
    from optpipe_server.work.worker import work

    logs.configure(log_json)
    settings = Settings(database, solves=solves, memory_mib=memory_mib)
    work(with_threads(settings, threads), name or default_worker_name(), metrics_host, metrics_port)
