"""Running the service: quiet, and gone within seconds of being asked, open event streams or not."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from optpipe.errors import InputError
from optpipe_server.app import create_app
from optpipe_server.http.connections import LONGEST_HEAD, connections
from optpipe_server.service import Service
from optpipe_server.settings import Settings

GRACE_S = 5  # for requests that are under way when the service is asked to end


class Server(uvicorn.Server):
    """Uvicorn waits for open responses before it tells the application to end; event streams have to be told first."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.changes.close()
        await super().shutdown(sockets)


def announce(url: str) -> None:
    print(f"optpipe serves on {url}", flush=True)


def serve(host: str = "127.0.0.1", port: int = 8000, database: str = Settings.database, ready: Callable[[str], None] = announce) -> None:
    """Serves until SIGINT or SIGTERM. `ready(url)` is called when requests are answered; port 0 is a free port.

    Raises `InputError` for a database or an address that cannot be used. There are no keys yet, so only this machine may ask: a host
    that others can reach is refused.
    """
    with listen(host, port) as listener:
        server = make_server(listener, Settings(database), ready)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended in order and passes the signal on
            server.run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on this machine's own address."""
    if not _is_loopback(host):
        raise InputError(
            f"host = {host!r}: the service has no keys yet and listens on this machine only; 127.0.0.1, ::1 or localhost would be right"
        )
    if not 0 <= port <= 65535:
        raise InputError(f"port = {port}: must be 0 to 65535")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except OSError as error:
        raise InputError(f"port = {port}: {error.strerror or error}") from None


def make_server(listener: socket.socket, settings: Settings, ready: Callable[[str], None]) -> Server:
    """The server that will answer on the socket; `run` it, from a thread of its own where signals belong to somebody else."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http=connections(settings.streams),
        h11_max_incomplete_event_size=LONGEST_HEAD,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config, app.state.service, lambda: ready(url))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
