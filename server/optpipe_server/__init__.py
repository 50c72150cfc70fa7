"""The solver service: jobs over HTTP, solved by child processes, followed as events.

from optpipe_server import Settings, create_app, serve
serve(port=8000, database="sqlite:///optpipe.db")  # or an ASGI server of your own: create_app(Settings(...))
"""

from __future__ import annotations

from optpipe_server.app import create_app
from optpipe_server.serve import serve
from optpipe_server.settings import Settings

__all__ = ["Settings", "create_app", "serve"]
