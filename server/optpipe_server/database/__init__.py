"""One database for jobs, incumbents, leases, keys and cached schedules: SQLite or PostgreSQL, named by a URL.

`tables` describes them and `migrations` makes them; `engine` connects. `Jobs` is what clients do with a job, `Leases`
what workers do with it, `upkeep` what any process does for all of them.
"""

from __future__ import annotations

from optpipe_server.database.engine import AwayError, Database
from optpipe_server.database.jobs import InitialResult, Jobs, NewJob
from optpipe_server.database.leases import Leases
from optpipe_server.database.upkeep import prune, prune_schedules, reap

__all__ = ["AwayError", "Database", "InitialResult", "Jobs", "Leases", "NewJob", "prune", "prune_schedules", "reap"]
