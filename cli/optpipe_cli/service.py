"""The service: `optpipe serve`, `optpipe worker`, and `optpipe keys ...`, who may use it and for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt
from cyclopts.validators import Number

from optpipe.errors import InputError
from optpipe_cli.options import Json, need
from optpipe_cli.output import echo, print_json, print_rows

if TYPE_CHECKING:
    from optpipe_server.database.keys import Keys

DATABASE = "sqlite:///optpipe.db"
Database = Annotated[str, Parameter(env_var="OPTPIPE_DATABASE")]
KeysDatabase = Annotated[Database, Parameter(help="The service's; the service may be running.")]
Threads = Annotated[int | None, Parameter(validator=Number(gte=1, lte=1024), help="Shared equally by searches.")]
MemoryMib = Annotated[int | None, Parameter(validator=Number(gte=64), help="Of one search's processes together.")]
LogJson = Annotated[bool | None, Parameter(help="Log JSON lines or readable ones. Default: JSON unless on a terminal.")]


def serve(
    *,
    host: Annotated[str, Parameter(help="Address. One that others can reach needs a key first.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes a free one. It is printed.")] = 8000,
    database: Annotated[Database, Parameter(help="sqlite:///FILE or postgresql://...")] = DATABASE,
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
    need("server")
    from optpipe_server.fork_server import start_fork_server

    start_fork_server()  # beside what is loaded here
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
        **_without_none(threads=threads),
    )
    run(settings, host, port, ready=lambda url: print(f"listening on {url}", flush=True))


def _without_none(**values: int | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
    need("server")
    from optpipe_server import logs
    from optpipe_server.settings import Settings
    from optpipe_server.work import default_worker_name
    from optpipe_server.work.worker import work

    logs.configure(log_json)
    settings = Settings(database, solves=solves, memory_mib=memory_mib, **_without_none(threads=threads))
    work(settings, name or default_worker_name(), metrics_host, metrics_port)


def create(
    name: Annotated[str, Parameter(help="Whose key it is, or what for: jobs show it.")],
    /,
    *,
    scope: Annotated[list[str], Parameter(help="submit, read or admin; repeat it for several.")],
    database: KeysDatabase = DATABASE,
) -> None:
    """`optpipe keys create`."""
    with _keys(database, may_be_new=True) as keys:
        echo(keys.create(name, scope))


def list_(*, database: KeysDatabase = DATABASE, json: Json = False) -> None:
    """`optpipe keys list`."""
    with _keys(database) as keys:
        rows = [dict(row._mapping) for row in keys.list()]
    if json:
        print_json([row | {"scopes": row["scopes"].split()} for row in rows])
    else:
        print_rows(rows, "there are no keys")


def revoke(
    key: Annotated[str, Parameter(help="Its id: the middle of op_ID_SECRET, as `list` shows it.")],
    /,
    *,
    database: KeysDatabase = DATABASE,
) -> None:
    """`optpipe keys revoke`."""
    with _keys(database) as keys:
        keys.revoke(key)
    echo(f"{key} is revoked")


@contextmanager
def _keys(url: str, may_be_new: bool = False) -> Iterator[Keys]:
    """The keys in a database. Raises `InputError` where it would be created only to find no keys in it."""
    file = url.removeprefix("sqlite:///")
    is_new = file != url and not Path(file).exists()
    if is_new and not may_be_new:
        raise InputError(f"--database = {url!r}: there is no such file here; name the service's database")
    need("server")
    from sqlalchemy.exc import SQLAlchemyError

    from optpipe_server.database import Database
    from optpipe_server.database.keys import Keys

    database = Database(url, secondary=True)
    try:
        yield Keys(database)
    except SQLAlchemyError as error:
        raise InputError(f"database: {getattr(error, 'orig', None) or error}") from None
    finally:
        database.close()
    if is_new:
        echo(f"note: {url} did not exist: a service of another database does not know this key", err=True)
