"""How long and of what kind a request's body may be, in one place, so that no route forgets it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optpipe_server.http.replies import ReplyError

LONGEST_BODY = 2**20  # bytes


class BodyLimits:
    """The app gets a body that has arrived in full, or the client gets a `ReplyError`: 400, 413, 415.

    How slowly it may arrive is the connection's matter (`connections`). Any web page can send any other type than JSON
    to a service on this machine without being asked; so a body is JSON or nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if any(encoding.strip().lower() != "identity" for encoding in headers.getlist("content-encoding")):
            raise ReplyError(415, "Content-Encoding: the body must not be compressed.")
        if (
            "content-length" in headers and "transfer-encoding" in headers
        ):  # whoever is before us may read it otherwise (RFC 9112, 6.1)
            raise ReplyError(400, "Content-Length and Transfer-Encoding exclude each other.", {"Connection": "close"})
        for length in headers.getlist("content-length"):
            if not (length.isascii() and length.isdecimal()):
                raise ReplyError(400, "Content-Length must be a number.")
            if len(length) > 20 or int(length) > LONGEST_BODY:
                raise _too_long()
        body = await _read(receive)
        if body is None:  # nobody is there to be told
            return
        kinds = {kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")}
        if body and kinds != {"application/json"}:
            raise ReplyError(415, "Content-Type must be application/json.")
        await self._app(scope, _again(body, receive), send)


def _too_long() -> ReplyError:
    return ReplyError(413, f"The body is longer than {LONGEST_BODY} bytes.")


async def _read(receive: Receive) -> bytes | None:
    """The body; None where the client went away before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            raise _too_long()
        if not message.get("more_body", False):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what else the server has to say: that the client went away."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def told() -> Message:
        return messages.pop() if messages else await receive()

    return told
