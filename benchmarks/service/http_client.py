"""An HTTP/1.1 client on bare asyncio streams, which takes little CPU from what it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

IDLE_S = 2.0  # the service closes connections that are idle for longer


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Event:
    """A server-sent event; `number` is its id, or None."""

    name: str
    number: int | None
    data: Any


class HttpConnection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str | None) -> None:
        self._reader, self._writer, self._key = reader, writer, key

    @classmethod
    async def open(cls, address: tuple[str, int], key: str | None) -> HttpConnection:
        """Raises `OSError`."""
        return cls(*await asyncio.open_connection(*address, limit=2**22), key)

    def abort(self) -> None:
        """Disconnect abruptly, like a pulled cable."""
        self._writer.transport.abort()

    async def request(self, method: str, path: str, body: Any = None, key: str | None = None) -> Reply:
        """Send a request. Raises `OSError` or `EOFError` if the connection ends before the reply does."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        self._send(method, path, "Content-Type: application/json\r\n" if content else "", content, key)
        status, headers = await self._head()
        return Reply(status, headers, await self._reader.readexactly(int(headers.get("content-length", "0"))))

    async def events(self, path: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events of a stream until it ends. Raises `OSError` or `EOFError` if it is cut or refused."""
        self._send("GET", path, f"Last-Event-ID: {after}\r\n" if after else "", b"")
        status, _headers = await self._head()
        if status != 200:
            raise ConnectionError(f"{path}: status {status}")
        unread = b""
        while length := int(await self._reader.readuntil(b"\r\n"), 16):
            unread += (await self._reader.readexactly(length + 2))[:-2]
            *whole, unread = unread.split(b"\n\n")
            for block in whole:
                if block.startswith(b":"):
                    continue
                fields = dict(line.split(": ", 1) for line in block.decode().splitlines())
                number = fields.get("id")
                yield Event(fields["event"], None if number is None else int(number), json.loads(fields["data"]))

    def _send(self, method: str, path: str, headers: str, content: bytes, key: str | None = None) -> None:
        length = f"Content-Length: {len(content)}\r\n" if content or method != "GET" else ""
        key = key or self._key
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}{length}{headers}\r\n"
        self._writer.write(head.encode() + content)

    async def _head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in headers.items()}


class HttpPool:
    """As many connections to one server as there are requests at a time."""

    def __init__(self, address: tuple[str, int], key: str | None) -> None:
        self.address, self._key = address, key
        # Idle connections, and since when; the last one is used next.
        self._free: list[tuple[HttpConnection, float]] = []

    async def request(self, method: str, path: str, body: Any = None, key: str | None = None) -> Reply:
        """Raises `OSError` or `EOFError`."""
        connection = await self._any()
        try:
            reply = await connection.request(method, path, body, key)
        except BaseException:
            connection.abort()
            raise
        if reply.headers.get("connection") == "close":
            connection.abort()
        else:
            self._free.append((connection, time.monotonic()))
        return reply

    async def _any(self) -> HttpConnection:
        if self._free and time.monotonic() - self._free[-1][1] < IDLE_S:
            return self._free.pop()[0]
        self.close()
        return await HttpConnection.open(self.address, self._key)

    def close(self) -> None:
        """Close the idle connections."""
        while self._free:
            self._free.pop()[0].abort()
