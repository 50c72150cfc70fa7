"""The queue of a service on PostgreSQL: Procrastinate's tables beside ours, to which a job is added as it is stored."""

from __future__ import annotations

from procrastinate import App, SyncPsycopgConnector
from procrastinate.exceptions import ConnectorException
from procrastinate.schema import SchemaManager
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

SOLVE = "solve"  # the name of the task, whose argument is a job's id
FIRST = 1000  # above every job's priority

_FORGOTTEN = text(
    "select id from jobs where state in ('queued', 'running') and not exists "
    "(select from procrastinate_jobs where lock = jobs.id and status in ('todo', 'doing'))"
)
_app = App(connector=SyncPsycopgConnector())  # never opened: it uses our connections


def create_queue(db: Connection) -> None:
    """Create Procrastinate's tables in this transaction unless they are there."""
    if db.execute(text("select to_regclass('procrastinate_jobs')")).scalar_one() is None:
        db.connection.cursor().execute(SchemaManager.get_schema())


def enqueue(db: Connection, job_id: str, priority: int) -> None:
    """Let a worker solve the job once this transaction is committed; one job is solved by one worker at a time."""
    connection = db.connection.driver_connection
    try:
        _app.configure_task(SOLVE, lock=job_id, priority=priority, connection=connection).defer(job_id=job_id)
    except ConnectorException as error:
        raise OperationalError(None, None, error.__cause__ or error) from error


def enqueue_forgotten(db: Connection) -> None:
    """Enqueue the open jobs that have no task, since their workers were lost; they come first.

    Each gets a new task: a worker that was taken for lost and goes on ends its own.
    """
    for job_id in db.execute(_FORGOTTEN).scalars().all():
        enqueue(db, job_id, FIRST)
