"""Clients that are slow or say nothing: uvicorn's connections, with an end to how long each of them may take, and to
how many there are."""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from optpipe_server.http.replies import problem_document

ARRIVES_S = 30.0  # from the beginning of a connection, or of a further request on it, until all of the request is there
TAKEN_S = 30.0  # how long a client may leave what it is sent where it is
MOST_ARRIVING = (
    2**26
)  # bytes of a request; what is too long for the service is refused and thrown away, so that its sender can read why
LONGEST_HEAD = 2**14  # bytes of a request's line and headers
OTHERS = 1000  # connections beside event streams
FILES = 300  # that the process needs beside its connections


def connections(streams: int) -> type[Connection]:
    """The connections of one server with so many event streams, as uvicorn's `http` wants them; as many as the system
    lets it open."""
    wanted = streams + OTHERS + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    return type("Connection", (Connection,), {"most": max(1, files - FILES), "waiting": {}})


class Connection(H11Protocol):
    """Uvicorn itself waits forever for the rest of a request, and for a client that does not read what it is sent.

    Where there are `most` connections, one that has no request, or not all of one, makes room for another, the oldest
    first: those who say nothing keep nobody out.
    """

    most: ClassVar[int]
    waiting: ClassVar[dict[Connection, None]]  # for a request or the rest of one, the oldest first

    _arriving: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None
    _arrived = 0  # bytes of the request that arrives

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            next(iter(self.waiting), self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._arrived += len(data)
        self._watch()
        if self._arrived > MOST_ARRIVING:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._incomplete:
            self.waiting.setdefault(self)  # uvicorn's own time between requests runs

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        for timer in (self._arriving, self._leaving):
            if timer is not None:
                timer.cancel()

    @property
    def _incomplete(self) -> bool:
        """Whether there is no request, or not all of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _watch(self) -> None:
        """Begins, or ends, the time in which a request has to arrive."""
        if not self._incomplete:
            self.waiting.pop(self, None)
            self._arrived = 0
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
        """Ends the connection, with a reply where none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = problem_document(status, detail, {"Connection": "close"})
            head = h11.Response(status_code=status, headers=reply.raw_headers, reason=HTTPStatus(status).phrase)
            for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._leaving = self.loop.call_later(TAKEN_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
