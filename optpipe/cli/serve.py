"""`optpipe serve`: the solver service."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and prints it.")] = 8000,
    database: Annotated[str, typer.Option(help="Database URL; SQLite by default.")] = "sqlite:///optpipe.db",
) -> None:
    """Run the service that solves problems beside a training."""
    from optpipe.cli.extras import need

    need("server")
    from optpipe_server import serve as run

    run(host, port, database, ready=lambda url: print(f"listening on {url}", flush=True))
