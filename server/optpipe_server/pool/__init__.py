"""Processes that compute replies: first schedules, the workbench, pictures and diagnoses.

`pool` keeps them; `schedules` and `diagnosis` are the tasks that run in them.
"""

from __future__ import annotations

from optpipe_server.pool.pool import BUSY, Pool, TaskError

__all__ = ["BUSY", "Pool", "TaskError"]
