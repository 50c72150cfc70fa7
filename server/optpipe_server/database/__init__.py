"""One database for jobs, incumbents, keys and cached schedules: SQLite or PostgreSQL, named by a URL.

`tables` describes them; `engine` connects and creates them. `Jobs` is what clients do with a job, `Searches` what
workers do with it, by the `changes` that both make. On SQLite the jobs' table is the queue; on PostgreSQL jobs have
tasks in Procrastinate's.
"""

from __future__ import annotations

from optpipe_server.database.engine import AwayError, Database
from optpipe_server.database.jobs import InitialResult, Jobs, NewJob
from optpipe_server.database.searches import Searches

__all__ = ["AwayError", "Database", "InitialResult", "Jobs", "NewJob", "Searches"]
