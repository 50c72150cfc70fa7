"""`optpipe keys ...`: who may use the service, and for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from optpipe_cli.output import Json, echo, print_json, print_rows

if TYPE_CHECKING:
    from optpipe_server.database.keys import Keys

DatabaseUrl = Annotated[str, Parameter(env_var="OPTPIPE_DATABASE", help="The service's; the service may be running.")]
DEFAULT = "sqlite:///optpipe.db"  # as `optpipe serve`


def create(
    name: Annotated[str, Parameter(help="Whose key it is, or what for: jobs show it.")],
    /,
    *,
    scope: Annotated[list[str], Parameter(help="submit, read or admin; repeat it for several.")],
    database: DatabaseUrl = DEFAULT,
) -> None:
    """`optpipe keys create`."""
    is_new = _missing_file(database)
    with _keys(database) as keys:
        echo(keys.create(name, scope))
    if is_new:
        echo(f"note: {database} did not exist: a service of another database does not know this key", err=True)


def list_(*, database: DatabaseUrl = DEFAULT, json: Json = False) -> None:
    """`optpipe keys list`."""
    _require_file(database)
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
    database: DatabaseUrl = DEFAULT,
) -> None:
    """`optpipe keys revoke`."""
    _require_file(database)
    with _keys(database) as keys:
        keys.revoke(key)
    echo(f"{key} is revoked")


def _missing_file(url: str) -> bool:
    file = url.removeprefix("sqlite:///")
    return file != url and not Path(file).exists()


def _require_file(url: str) -> None:
    """Raise `InputError` where a database would be made only to find no keys in it."""
    from optpipe.errors import InputError

    if _missing_file(url):
        raise InputError(f"--database = {url!r}: there is no such file here; name the service's database")


@contextmanager
def _keys(url: str) -> Iterator[Keys]:
    from optpipe_cli.extras import need

    need("server")
    from sqlalchemy.exc import SQLAlchemyError

    from optpipe.errors import InputError
    from optpipe_server.database import Database
    from optpipe_server.database.keys import Keys

    database = Database(url, secondary=True)
    try:
        yield Keys(database)
    except SQLAlchemyError as error:
        raise InputError(f"database: {getattr(error, 'orig', None) or error}") from None
    finally:
        database.close()
