"""The process from which the pool forks its own."""

from __future__ import annotations

from multiprocessing import forkserver


def start_fork_server() -> None:
    """Let it load what the pool's processes run, beside what the caller loads now."""
    forkserver.set_forkserver_preload(["optpipe_server.pool.warm"])
    forkserver.ensure_running()
