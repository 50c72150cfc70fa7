"""Limits on the length and type of request bodies, in one place, so that no route can forget them."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optpipe_server.http.replies import ReplyError

LONGEST_BODY = 2**20  # bytes


class BodyLimits:
    """Passes a body on that has arrived in full, or raises `ReplyError`: 400, 413, 415.

    How slowly it may arrive is limited in `connections`. Web pages may send any type except JSON to a service on this
    machine without asking first, so a body has to be JSON.
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
        # A proxy before us may read such a request in another way (RFC 9112, section 6.1).
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ReplyError(400, "Content-Length and Transfer-Encoding exclude each other.", {"Connection": "close"})
        for length in headers.getlist("content-length"):
            if not (length.isascii() and length.isdecimal()):
                raise ReplyError(400, "Content-Length must be a number.")
            if len(length) > 20 or int(length) > LONGEST_BODY:
                raise _too_long()
        body = await _read(receive)
        if body is None:  # nobody is there to get a reply
            return
        kinds = {kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")}
        if body and kinds != {"application/json"}:
            raise ReplyError(415, "Content-Type must be application/json.")
        await self._app(scope, _again(body, receive), send)


def _too_long() -> ReplyError:
    return ReplyError(413, f"The body is longer than {LONGEST_BODY} bytes.")


async def _read(receive: Receive) -> bytes | None:
    """The body; None if the client disconnected before its end."""
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
    """The body as one message, then further messages, such as that the client has disconnected."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
