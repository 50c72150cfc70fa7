"""Tables are made from `tables`, and those of an older release brought up to date by Alembic, whenever a database is
opened."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, text

from optpipe.errors import InputError
from optpipe_server.database.tables import metadata, probes

_LOCK = 0x6F70_7470_6970_65  # advisory lock of PostgreSQL, held while a process migrates


def upgrade(connection: Connection, only_check: bool = False) -> None:
    """Bring the tables up to date in the connection's transaction, or with `only_check` change nothing.

    Raises `InputError` if this release does not know them, or with `only_check` if they are those of an older one.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("select pg_advisory_xact_lock(:number)"), {"number": _LOCK})
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    scripts, context = ScriptDirectory.from_config(config), MigrationContext.configure(connection)
    current, newest = context.get_current_revision(), scripts.get_current_head()
    if current == newest:
        return
    if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
        raise InputError(
            f"database: its tables have revision {current!r}, which this release does not know; another one made them"
        )
    if only_check:
        raise InputError("database: a process of an older release uses it; end that first")
    if current is None:
        metadata.create_all(connection, checkfirst=False)  # tables of another program are an error
        connection.execute(insert(probes).values(number=1, text=""))
        context.stamp(scripts, "head")
    else:
        command.upgrade(config, "head")
