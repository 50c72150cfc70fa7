"""Runs the service with uvicorn, and ends it within seconds, whether event streams are open or not."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from optpipe.errors import InputError
from optpipe.process.background import settle
from optpipe_server.http.app import create_app
from optpipe_server.http.auth import is_loopback
from optpipe_server.http.service import Service
from optpipe_server.settings import Settings

GRACE_S = 5  # for requests in progress when the service is to end
IDLE_S = 10.0  # for a request's first line and headers to arrive, and between two requests
LONGEST_HEAD = 2**14  # bytes of a request's first line and headers
OTHERS = 1000  # connections besides event streams
FILES = 300  # files that the process needs besides its connections


class Server(uvicorn.Server):
    """A uvicorn server that ends event streams first, for which uvicorn would wait, and connections without a request,
    which it would keep for ever."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service, self._ready = service, ready
        self._without_request: dict[H11Protocol, float] = {}  # connections, and since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        now, connections = time.monotonic(), cast("set[H11Protocol]", self.server_state.connections)
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        self._without_request = {each: self._without_request.get(each, now) for each in idle}
        for connection, since in self._without_request.items():
            if now - since > IDLE_S:
                connection.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.closing()
        await super().shutdown(sockets)


PRINT: Callable[[str], None] = partial(print, "optpipe serves on", flush=True)


def serve(
    settings: Settings | None = None, host: str = "127.0.0.1", port: int = 8000, ready: Callable[[str], None] = PRINT
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
        http="h11",
        h11_max_incomplete_event_size=LONGEST_HEAD,
        limit_concurrency=connections(settings.streams + OTHERS),
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config, service, lambda: ready(url))


def connections(most: int) -> int:
    """Let the process open so many connections; return how many the system allows."""
    wanted = most + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - FILES)
