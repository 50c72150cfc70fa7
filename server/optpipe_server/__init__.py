"""The solver service: jobs over HTTP, solved by child processes, followed as events.

from optpipe_server import Settings, create_app, serve
serve(Settings(database="sqlite:///optpipe.db"), port=8000)  # or an ASGI server of your own: create_app(Settings(...))

Rooms: `database` (jobs, incumbents, keys), `http` (the API), `work` (takes jobs and runs solvers). The files
beside them are what `http` and `work` share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optpipe_server import logs  # configures structlog, so that stdout stays the caller's

if TYPE_CHECKING:
    from optpipe_server.http.app import create_app
    from optpipe_server.http.server import serve
    from optpipe_server.settings import Settings

# Imported when first used, so that a worker does not load FastAPI.
_HOME = {"Settings": "settings", "create_app": "http.app", "serve": "http.server"}
__all__ = ["Settings", "create_app", "logs", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optpipe_server' has no attribute {name!r}")
    return getattr(importlib.import_module(f"optpipe_server.{_HOME[name]}"), name)
