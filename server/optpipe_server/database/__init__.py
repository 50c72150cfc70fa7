"""One database: jobs, incumbents, leases, keys, cached schedules; SQLite or PostgreSQL by one URL."""

from __future__ import annotations

from optpipe_server.database.engine import AwayError, Database
from optpipe_server.database.jobs import Jobs, NewJob, Start
from optpipe_server.database.leases import Leases, reap

__all__ = ["AwayError", "Database", "Jobs", "Leases", "NewJob", "Start", "reap"]
