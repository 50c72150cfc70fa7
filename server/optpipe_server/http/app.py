"""The FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import optpipe
from optpipe_server.http import health, own_processes, page, results, routes, tools, workbench
from optpipe_server.http.auth import Callers
from optpipe_server.http.replies import ANY_ERROR, HANDLERS
from optpipe_server.http.service import Service
from optpipe_server.settings import Settings

ABOUT = (
    "Solves problems: the first schedule is in the reply, better ones are sent as events. "
    "Errors are problem documents (RFC 9457)."
)
ROUTERS = (
    routes.router,
    results.router,
    tools.router,
    own_processes.uploads,
    workbench.router,
    health.router,
    health.guarded,
    page.router,
)


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
    app.state.service, app.state.callers = service, Callers(service.keys)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(SafeHeaders)
    app.add_middleware(health.RequestMetrics)
    return app


class SafeHeaders:
    """Adds headers to every reply: it is not stored, and browsers do not guess its type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        await self._app(scope, receive, send_with_headers)
