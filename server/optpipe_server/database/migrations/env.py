"""Run by Alembic; the connection and its transaction are the caller's."""

from __future__ import annotations

from alembic import context

from optpipe_server.database.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=connection.dialect.name == "sqlite")
context.run_migrations()
