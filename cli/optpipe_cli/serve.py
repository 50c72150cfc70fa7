"""`optpipe serve`: the solver service."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from cyclopts.validators import Number

if TYPE_CHECKING:
    from optpipe_server import Settings

Database = Annotated[str, Parameter(env_var="OPTPIPE_DATABASE")]
Threads = Annotated[int | None, Parameter(validator=Number(gte=1, lte=1024), help="Of all searches together.")]
MemoryMib = Annotated[int | None, Parameter(validator=Number(gte=64), help="Of one search's processes together.")]
LogJson = Annotated[bool | None, Parameter(help="Log JSON lines or readable ones. Default: JSON unless on a terminal.")]


def serve(
    *,
    host: Annotated[str, Parameter(help="Address. One that others can reach needs a key first.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes a free one. It is printed.")] = 8000,
    database: Annotated[Database, Parameter(help="sqlite:///FILE or postgresql://...")] = "sqlite:///optpipe.db",
    solves: Annotated[int, Parameter(validator=Number(gte=0, lte=1000), help="Searches at a time; 0: workers'.")] = 1,
    threads: Threads = None,
    memory_mib: MemoryMib = None,
    open_jobs: Annotated[NonNegativeInt, Parameter(help="Jobs of one key that wait or run, at most.")] = 100,
    keep: Annotated[PositiveInt | None, Parameter(help="Finished jobs to keep. Default: all.")] = None,
    keep_days: Annotated[NonNegativeFloat | None, Parameter(help="Of finished jobs and unused schedules.")] = None,
    streams: Annotated[PositiveInt, Parameter(help="Event streams at a time, at most.")] = 1000,
    log_json: LogJson = None,
) -> None:
    """`optpipe serve`."""
    from optpipe_cli.extras import need

    need("server")
    from optpipe_cache import Retention
    from optpipe_server import Settings, logs
    from optpipe_server import serve as run

    logs.configure(log_json)
    settings = Settings(
        database,
        solves=solves,
        memory_mib=memory_mib,
        open_jobs=open_jobs,
        kept=Retention(keep, keep_days),
        streams=streams,
    )
    run(with_threads(settings, threads), host, port, ready=lambda url: print(f"listening on {url}", flush=True))


def with_threads(settings: Settings, threads: int | None) -> Settings:
    return settings if threads is None else replace(settings, threads=threads)
