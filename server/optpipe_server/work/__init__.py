"""Who solves: the supervisor, which claims jobs and follows one child process a solve, and the reaper of those whose
supervisor is gone."""

from __future__ import annotations

from optpipe_server.work.reaper import Reaper
from optpipe_server.work.supervisor import Supervisor, own_name

__all__ = ["Reaper", "Supervisor", "own_name"]
