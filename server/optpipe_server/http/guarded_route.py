"""`GuardedRoute`: refuses a request by its headers, then by its body, before FastAPI reads it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request, params
from fastapi.responses import Response
from fastapi.routing import APIRoute

from optpipe_server.http.replies import ReplyError

LONGEST_BODY = 2**20  # bytes
LONGEST_UPLOAD = 2**26  # bytes of a trace
UPLOADED = "application/octet-stream"
SMALL_BODY = 2**15  # bytes; one that large is read in a millisecond
MOST_NAMES = 1000  # in one object; each that is wrong would be an error of its own


class GuardedRequest(Request):
    """A request whose body is limited and strict JSON: FastAPI's own reader would accept the same name twice.

    Web pages may send forms and texts to a service on this machine without asking first, so a body has to be JSON. How
    slowly it may arrive is limited in `connections`.
    """

    longest, kind, larger = LONGEST_BODY, "application/json", ""

    def check_headers(self) -> None:
        """Raise `ReplyError` for a body that will not be read: 400, 413, 415."""
        headers = self.headers
        if any(encoding.strip().lower() != "identity" for encoding in headers.getlist("content-encoding")):
            raise ReplyError(415, "Content-Encoding: the body must not be compressed.")
        # A proxy before us may read such a request in another way (RFC 9112, section 6.1).
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ReplyError(400, "Content-Length and Transfer-Encoding exclude each other.", {"Connection": "close"})
        for length in headers.getlist("content-length"):
            if not (length.isascii() and length.isdecimal()):
                raise ReplyError(400, "Content-Length must be a number.")
            if len(length) > 20 or int(length) > self.longest:
                raise self._too_long()

    async def read_first(self) -> None:
        """Read the body before the route is called."""
        if self.method != "GET":
            await self.body()

    async def body(self) -> bytes:
        """Return the body. Raises `ReplyError`: 413, 415."""
        if not hasattr(self, "_body"):
            self._body = b"".join([chunk async for chunk in self.chunks()])
        return self._body

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces. Raises `ReplyError`: 413, 415."""
        length = 0
        kinds = {kind.partition(";")[0].strip().lower() for kind in self.headers.getlist("content-type")}
        async for chunk in self.stream():
            length += len(chunk)
            if length > self.longest:
                raise self._too_long()
            if chunk and kinds != {self.kind}:
                raise ReplyError(415, f"Content-Type must be {self.kind}.")
            yield chunk

    async def json(self) -> Any:
        """Return what the body says. Raises `ReplyError` (400). Large ones are read in a thread, one at a time."""
        body = await self.body()
        if len(body) <= SMALL_BODY:
            return strict_json(body)
        return await anyio.to_thread.run_sync(strict_json, body, limiter=self.app.state.service.read_limiter)

    def _too_long(self) -> ReplyError:
        return ReplyError(413, f"The body is longer than {self.longest} bytes{self.larger}.")


class UploadRequest(GuardedRequest):
    """A request whose body is a file, which the route reads in pieces."""

    longest, kind, larger = LONGEST_UPLOAD, UPLOADED, ": `optpipe diagnose FILE` reads larger traces"

    async def read_first(self) -> None:
        pass


class GuardedRoute(APIRoute):
    """A route that needs a scope: `dependencies=[READ]` (`optpipe_server.http.auth`). One without is not made.

    FastAPI reads a body before it calls dependencies. Here the caller is known first, so that nobody without a key can
    have a body read.
    """

    request = GuardedRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        (scope,) = (
            name for each in self.dependencies if isinstance(each, params.Security) for name in each.scopes or ()
        )

        async def guarded(request: Request) -> Response:
            request.state.caller = await request.app.state.callers.authorized(request, scope)
            request = self.request(request.scope, request.receive)
            request.check_headers()
            await request.read_first()
            return await answer(request)

        return guarded


class UploadRoute(GuardedRoute):
    request = UploadRequest


def guarded_router(prefix: str, tag: str, route: type[GuardedRoute] | None = None) -> APIRouter:
    return APIRouter(prefix=prefix, tags=[tag], route_class=route or GuardedRoute)


def strict_json(body: bytes) -> Any:
    """Return what a JSON text says. Raises `ReplyError` (400) if it is not JSON or has the same name twice."""
    try:
        return json.loads(body.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise ReplyError(400, "The body is not valid JSON.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_NAMES:
        raise ReplyError(422, f"The body has an object with {len(pairs)} names; expected up to {MOST_NAMES}.")
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ReplyError(400, "The body has an object with the same name twice.")
    "".join(content).encode()  # raises ValueError for lone surrogates
    return content
