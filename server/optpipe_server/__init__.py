"""The solver service: jobs over HTTP, solved by child processes, followed as events.

from optpipe_server import Settings, create_app, serve
serve(Settings(database="sqlite:///optpipe.db"), port=8000)  # or an ASGI server of your own: create_app(Settings(...))
"""

from __future__ import annotations

from optpipe_server import logs  # configures structlog: stdout stays the caller's
from optpipe_server.http.app import create_app
from optpipe_server.serve import serve
from optpipe_server.settings import Settings

__all__ = ["Settings", "create_app", "logs", "serve"]
