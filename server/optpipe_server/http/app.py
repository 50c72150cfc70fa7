"""The FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import optpipe
from optpipe_server.http import auth, estimates, health, openapi, page, replies, results, routes, tools, workbench
from optpipe_server.http.compare_processes import CompareProcesses
from optpipe_server.http.service import Service
from optpipe_server.settings import Settings

ABOUT = (
    "Solves problems: the first schedule is in the reply, better ones are sent as events. "
    "Errors are problem documents (RFC 9457)."
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
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.compare_processes = service, CompareProcesses(service.settings)
    for router in (
        routes.router,
        results.router,
        tools.router,
        estimates.router,
        workbench.router,
        health.router,
        page.router,
    ):
        app.include_router(router)
    replies.install(app)
    openapi.install(app)
    auth.install(app, service.keys)
    app.add_middleware(health.RequestMetrics)
    return app
