"""Runs the service with uvicorn, and ends it within seconds, whether event streams are open or not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import uvicorn

from optpipe.errors import InputError
from optpipe.process.heap import settle
from optpipe_server.http.app import create_app
from optpipe_server.http.auth import is_loopback
from optpipe_server.http.connections import LONGEST_HEAD, connections
from optpipe_server.http.service import Service
from optpipe_server.settings import Settings

GRACE_S = 5  # for requests in progress when the service is told to end


class Server(uvicorn.Server):
    """A uvicorn server that ends event streams first; uvicorn would wait for open responses before it tells the app to
    end."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.closing()
        await super().shutdown(sockets)


def announce(url: str) -> None:
    print(f"optpipe serves on {url}", flush=True)


def serve(
    settings: Settings | None = None, host: str = "127.0.0.1", port: int = 8000, ready: Callable[[str], None] = announce
) -> None:
    """Serve until SIGINT or SIGTERM.

    Parameters
    ----------
    port
        0 takes a free one.
    ready
        Called with the URL once requests are answered.

    Raises
    ------
    InputError
        If the database or the address is unusable, or others can reach the address and there are no keys.
    """

    def answers(url: str) -> None:
        settle()
        ready(url)

    with listen(host, port) as listener:
        server = make_server(listener, settings or Settings(), answers)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended and raises the signal again
            server.run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, also on the port of a process that has just ended."""
    if not 0 <= port <= 65535:
        raise InputError(f"port = {port}: must be 0 to 65535")
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"host = {host!r}, port = {port}: {why or error}") from None
    # Connections inherit it. Otherwise a reply's body waits 40 ms until the client acknowledges the head: asyncio sets
    # it only for sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_server(listener: socket.socket, settings: Settings, ready: Callable[[str], None]) -> Server:
    """Return the server that will answer on the socket.

    `run` it, in a thread of its own if the process handles signals itself. Raises `InputError` for wrong settings, and
    if others can reach the socket and there are no keys.
    """
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    app = create_app(settings)
    service: Service = app.state.service
    if not is_loopback(host) and not service.keys.read().any:
        service.database.close()
        raise InputError(
            f"host = {host!r}: others can reach it, and there are no keys yet; expected 127.0.0.1, or a key "
            "by `optpipe keys create NAME --scope submit --scope read`"
        )
    config = uvicorn.Config(
        app,
        http=connections(settings.streams),
        h11_max_incomplete_event_size=LONGEST_HEAD,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config, service, lambda: ready(url))
