"""`optpipe serve`: the solver service."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that others can reach needs a key first.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one. It is printed.")] = 8000,
    database: Annotated[
        str, typer.Option(envvar="OPTPIPE_DATABASE", help="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.")
    ] = "sqlite:///optpipe.db",
    solves: Annotated[
        int, typer.Option(min=0, max=1000, help="Searches at a time. With 0, `optpipe worker` processes search.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of all searches together. Default: all cores but one.")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option(min=64, help="Memory limit for all processes of one search together.")
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Jobs of one tenant that may wait.")] = 100,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Jobs of one tenant that are kept when they are over. Default: all.")
    ] = None,
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, help="Days that jobs are kept when they are over, and schedules that are not used."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Clients that may follow jobs at a time.")] = 1000,
    shared_cache: Annotated[bool, typer.Option("--shared-cache", help="Tenants find each other's schedules.")] = False,
    log_json: Annotated[
        bool | None, typer.Option(help="Log JSON lines or readable ones. Default: JSON unless on a terminal.")
    ] = None,
) -> None:
    """Run the service that solves problems while a training runs."""
    from optpipe_cli.extras import need

    need("server")
    from optpipe_cache import Retention
    from optpipe_server import Settings, logs
    from optpipe_server import serve as run

    logs.configure(log_json)
    settings = Settings(
        database,
        shared_cache=shared_cache,
        solves=solves,
        memory_mib=memory_mib,
        queue=queue,
        kept=Retention(keep, keep_days),
        streams=streams,
    )
    if threads is not None:
        settings = replace(settings, threads=threads)
    run(settings, host, port, ready=lambda url: print(f"listening on {url}", flush=True))
