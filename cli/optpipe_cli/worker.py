"""`optpipe worker`: a process that solves what the service was asked."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def worker(
    database: Annotated[
        str, typer.Option(envvar="OPTPIPE_DATABASE", help="PostgreSQL URL; the password may be in PGPASSWORD.")
    ],
    solves: Annotated[int, typer.Option(min=1, max=1024, help="Searches at a time.")] = 1,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Of all searches together; one less than there are cores by default.")
    ] = max(1, (os.cpu_count() or 1) - 1),
    memory_mib: Annotated[
        int | None, typer.Option(min=64, help="Of one search's processes together; no limit by default.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="In the database and the logs; host and process by default.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of /metrics and /healthz.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Their port; 0 is a free one, none without.")
    ] = None,
    log_json: Annotated[
        bool | None, typer.Option(help="Lines of JSON, or for people; by default JSON unless on a terminal.")
    ] = None,
    shared_cache: Annotated[bool, typer.Option(help="As the service: tenants find each other's schedules.")] = False,
) -> None:
    """Solve jobs of a service whose database is PostgreSQL, until told to end."""
    from optpipe_cli.extras import need

    need("server")
    from optpipe_server import logs
    from optpipe_server.settings import Settings
    from optpipe_server.work import default_worker_name
    from optpipe_server.work.worker import work

    logs.configure(log_json)
    settings = Settings(
        database=database, solves=solves, threads=threads, memory_mib=memory_mib, shared_cache=shared_cache
    )
    work(settings, name or default_worker_name(), metrics_host, metrics_port)
