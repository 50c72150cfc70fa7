"""Connections of slow or silent clients: limits on how long each may take, and on how many there are."""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from optpipe_server.http.replies import problem_document

ARRIVES_S = 30.0  # for a request to arrive in full, from the beginning of the connection or of the wait for another
READ_S = 30.0  # how long a client may leave what it is sent unread
LONGEST_HEAD = 2**14  # bytes of a request's first line and headers
OTHERS = 1000  # connections besides event streams
FILES = 300  # files that the process needs besides its connections


def connections(streams: int) -> type[Connection]:
    """Return the connection class of one server, for uvicorn's `http` setting.

    Allows `streams` event streams and `OTHERS` more connections, or as many as the system lets this process open.
    """
    wanted = streams + OTHERS + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    return type("Connection", (Connection,), {"most": max(1, files - FILES), "waiting": {}})


class Connection(H11Protocol):
    """Ends connections whose request does not arrive or whose reply is not read; uvicorn would wait for ever.

    At `most` connections, a new one replaces the oldest one without a complete request, so that silent clients keep
    nobody out.
    """

    most: ClassVar[int]
    waiting: ClassVar[dict[Connection, None]]  # for a complete request; the oldest first

    _arriving: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            next(iter(self.waiting), self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._incomplete:
            self.waiting.setdefault(self)  # uvicorn's keep-alive timer runs

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        for timer in (self._arriving, self._leaving):
            if timer is not None:
                timer.cancel()

    @property
    def _incomplete(self) -> bool:
        """Whether there is no complete request."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        """Start or stop the timer for the arrival of a request."""
        if not self._incomplete:
            self.waiting.pop(self, None)
            if self._arriving is not None:
                self._arriving.cancel()
                self._arriving = None
        elif self._arriving is None:
            self.waiting.setdefault(self)
            self._arriving = self.loop.call_later(
                ARRIVES_S, self._refuse, 408, f"The request did not arrive in full within {ARRIVES_S:g} s."
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection, with a reply if none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = problem_document(status, detail, {"Connection": "close"})
            head = h11.Response(status_code=status, headers=reply.raw_headers, reason=HTTPStatus(status).phrase)
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._leaving = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
