"""The FastAPI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import optpipe
from optpipe_server.http import health, jobs, page, results, tools
from optpipe_server.http.auth import Callers, refused
from optpipe_server.http.replies import ANY_ERROR, HANDLERS, ReplyError
from optpipe_server.http.service import Service
from optpipe_server.metrics import REQUESTS
from optpipe_server.settings import Settings

ABOUT = (
    "Solves problems: the first schedule is in the reply, better ones are sent as events. "
    "Errors are problem documents (RFC 9457)."
)
ROUTERS = (jobs.router, results.router, tools.router, health.router, page.router)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # clients may invent others, and each would stay a label
LONGEST_BODY = 2**20  # bytes
ARRIVES_S = 30.0  # for a body to arrive
CLOSE = {"Connection": "close"}  # where the rest of a body is not read


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the service as an ASGI application; `app.state.service` is its `Service`. Raises `InputError` for wrong
    settings."""
    service = Service(settings or Settings())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await service.close()

    app = FastAPI(
        title="OptPipe",
        version=optpipe.__version__,
        description=ABOUT,
        lifespan=lifespan,
        openapi_url=None,  # a route of ours, which needs a key
        redirect_slashes=False,
        responses=ANY_ERROR,
        exception_handlers=HANDLERS,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    page.mount_files(app)
    # The last one is asked first: who has no key has no body read.
    app.add_middleware(BoundedBody)
    app.add_middleware(AuthenticationMiddleware, backend=Callers(service.keys), on_error=refused)
    app.add_middleware(Observed)
    return app


class Observed:
    """Adds headers to every reply, so that nobody stores it or guesses its type, and measures every request until its
    reply is complete, except event streams, which stay open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            if status and not route.endswith("/events"):
                method = scope["method"] if scope["method"] in METHODS else "other"
                REQUESTS.labels(method, route, status).observe(time.perf_counter() - began)


class BoundedBody:
    """Refuses bodies that are too long (413) or arrive too slowly (408); a diagnosis reads longer ones."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        longest = tools.LONGEST_UPLOAD if scope["path"] == tools.UPLOADS else LONGEST_BODY
        length, complete, until = 0, False, time.monotonic() + ARRIVES_S

        async def bounded() -> Message:
            nonlocal length, complete
            try:
                async with asyncio.timeout(None if complete else max(0.0, until - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                raise ReplyError(408, f"The body did not arrive within {ARRIVES_S:g} s.", CLOSE) from None
            length += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if length > longest:
                hint = ": `optpipe diagnose FILE` reads larger traces" if longest > LONGEST_BODY else ""
                raise ReplyError(413, f"The body is longer than {longest} bytes{hint}.", CLOSE)
            return message

        await self._app(scope, bounded, send)
