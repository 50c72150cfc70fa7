"""The FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import optpipe
from optpipe_server.http import replies
from optpipe_server.routes import router
from optpipe_server.service import Service
from optpipe_server.settings import Settings


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service as an ASGI application; `app.state.service` is what stands behind it. Raises `InputError` for bad settings."""
    service = Service(settings or Settings())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.open()
        yield
        await service.close()

    app = FastAPI(title="OptPipe", version=optpipe.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_api_route("/healthz", healthz)
    replies.install(app)
    return app


def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok", "version": optpipe.__version__}
