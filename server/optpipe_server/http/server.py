"""Runs the service with uvicorn, and ends it within seconds, whether event streams are open or not."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

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
FILES = 300  # files that the process needs besides its connections, and for those that have just come
SPARE = 300  # connections left for whole requests; before others take them, some end
AT_ONCE = 64  # connections that are let in, or ended, before others are served
BACKLOG = 1024  # connections that the system keeps meanwhile


class Server(uvicorn.Server):
    """A uvicorn server that ends event streams first, for which uvicorn would wait, and connections without a request,
    which it would keep for ever."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service, self._ready = service, ready
        self._without_request: dict[H11Protocol, float] = {}  # connections, and since when

    @property
    def _connections(self) -> set[H11Protocol]:
        return cast("set[H11Protocol]", self.server_state.connections)

    def make_room(self) -> bool:
        """End some connections without a whole request, the oldest first, if there are too many; whether it did."""
        most = cast(int, self.config.limit_concurrency)
        if len(self._connections) <= max(1, most - SPARE):
            return False
        since, now = self._without_request, time.monotonic()
        halves = [each for each in self._connections if _is_idle(each) or each.cycle.more_body]
        ends = [each for each in halves if not each.transport.is_closing()]
        for each in sorted(ends, key=lambda each: since.get(each, now))[:AT_ONCE]:
            each.transport.abort()
        return bool(ends)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        now, idle = time.monotonic(), filter(_is_idle, self._connections)
        self._without_request = {each: self._without_request.get(each, now) for each in idle}
        for connection, since in self._without_request.items():
            if now - since > IDLE_S:
                connection.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.closing()
        await super().shutdown(sockets)


def _is_idle(connection: H11Protocol) -> bool:
    """Whether no head of a request has come since the last reply."""
    return connection.cycle is None or connection.cycle.response_complete


class Listener(socket.socket):
    """Lets a connection in once `make_room` has nothing to do.

    asyncio would let connections in until the process has no file left, and then log that thousands of times.
    """

    make_room: Callable[[], bool] = staticmethod(lambda: False)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.make_room():
            raise BlockingIOError  # those that have ended are closed first; then it is asked again
        return super().accept()

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """asyncio's `backlog` is what it lets in at once."""
        super().listen(BACKLOG)


PRINT: Callable[[str], None] = partial(print, "optpipe serves on", flush=True)


def serve(
    settings: Settings | None = None, host: str = "127.0.0.1", port: int = 8000, ready: Callable[[str], None] = PRINT
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the URL once requests are answered. Port 0 takes a free
    one.

    Raises `InputError` if the database or the address is unusable, or others can reach the address and there are no
    keys.
    """

    def answers(url: str) -> None:
        settle()
        ready(url)

    with listen(host, port) as listener:
        server = make_server(listener, settings or Settings(), answers)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended and raises the signal again
            server.run(sockets=[listener])


def listen(host: str, port: int) -> Listener:
    """Return a listening socket, also on the port of a process that has just ended."""
    if not 0 <= port <= 65535:
        raise InputError(f"port = {port}: must be 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = Listener(fileno=socket.create_server((host, port), family=family, backlog=BACKLOG).detach())
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"host = {host!r}, port = {port}: {why or error}") from None
    # Connections inherit it. Otherwise a reply's body waits 40 ms until the client acknowledges the head: asyncio sets
    # it only for sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_server(listener: Listener, settings: Settings, ready: Callable[[str], None]) -> Server:
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
        backlog=AT_ONCE,
        loop="asyncio",  # another one would not ask the listener
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = Server(config, service, lambda: ready(url))
    listener.make_room = server.make_room
    return server


def connections(most: int) -> int:
    """Let the process open so many connections; return how many the system allows."""
    wanted = most + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - FILES)
