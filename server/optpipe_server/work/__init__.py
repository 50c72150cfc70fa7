"""Solves jobs: claims them, runs one solver process per job, and keeps its limits.

`Supervisor` claims jobs and starts a `Solve` thread for each. Of the `rounds`, `Heartbeat` renews the leases and
`Reaper` frees the jobs of lost workers. `worker` is the process of `optpipe worker`.
"""

from __future__ import annotations

from optpipe_server.work.rounds import Reaper
from optpipe_server.work.supervisor import Supervisor, default_worker_name

__all__ = ["Reaper", "Supervisor", "default_worker_name"]
