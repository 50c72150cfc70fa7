"""Imported by the pool's fork server: what is loaded and compiled here, all of its processes have from their start."""

from __future__ import annotations

from optpipe.process.background import settle
from optpipe_server.pool import diagnosis, schedules

__all__ = ["diagnosis", "schedules"]

schedules.warm_up()
settle()
