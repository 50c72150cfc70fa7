"""The FastAPI application: what every request passes, and the routes beside those of jobs: the page at `/` with its
files, `/healthz`, `/readyz`, `/metrics` and `/openapi.json`.

The page's files are those of this package, the picture's modules and plotly. They are the same for everybody, so they
need no key. What they show comes from the API, with the reader's key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import MutableHeaders
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import optpipe
from optpipe.model.records import Record
from optpipe.show import page
from optpipe_server.database.tables import State
from optpipe_server.http import jobs, results, tools
from optpipe_server.http.auth import ADMIN, READ, Callers, refused
from optpipe_server.http.context import Context
from optpipe_server.http.replies import ANY_ERROR, ENDING, HANDLERS, SOON_S, ReplyError
from optpipe_server.http.service import Service
from optpipe_server.metrics import JOBS, REGISTRY, REQUESTS
from optpipe_server.settings import Settings

router = APIRouter(tags=["operation"])

ABOUT = (
    "Solves problems: the first schedule is in the reply, better ones are sent as events. "
    "Errors are problem documents (RFC 9457)."
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # clients may invent others, and each would stay a label
LONGEST_BODY = 2**20  # bytes
ARRIVES_S = 30.0  # for a body to arrive
CLOSE = {"Connection": "close"}  # where the rest of a body is not read
HEADERS = {
    "Cache-Control": "no-cache",
    # Plotly writes styles into what it draws; everything else comes from this service, and nobody may frame the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


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
    for each in (jobs.router, results.router, tools.router, router):
        app.include_router(each)
    app.mount("/page/picture", _Files(directory=page.WEB))
    app.mount("/page/plotly", _Files(packages=[("plotly", "package_data")]))
    app.mount("/page", _OWN)
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


class _Files(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response


_OWN = _Files(directory=Path(__file__).parent.parent / "web")


@router.get("/", response_class=HTMLResponse)
async def index(request: Request) -> Response:
    """The page: jobs, their schedules as they come in, and a workbench."""
    return await _OWN.get_response("index.html", request.scope)


class Health(Record):
    status: Literal["ok"] = "ok"
    version: str


class Ready(Record):
    """`solves` is the number of searches that this process runs at a time; with 0, workers search."""

    status: Literal["ready"] = "ready"
    solves: int


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(version=optpipe.__version__)


@router.get("/readyz")
async def readyz(request: Request) -> Ready:
    """The service accepts jobs and makes first schedules: it has begun, its database stores what is written, and it is
    not about to end.

    This says nothing of workers in other processes: without any, jobs wait with their first schedule.
    """
    service: Service = request.app.state.service
    if service.job_updates.closing:
        raise ReplyError(503, ENDING, retry_s=SOON_S)
    if not service.pool.is_ready:
        raise ReplyError(503, "The service starts.", retry_s=1)
    await service.probe()
    return Ready(solves=service.settings.solves)


@router.get("/metrics", dependencies=[ADMIN], response_class=PlainTextResponse)
def metrics(context: Context) -> Response:
    """The counters of this process in Prometheus' text format, and the number of jobs in each state if the database
    answers."""
    try:
        counted = context.service.jobs.count()
    except SQLAlchemyError:
        JOBS.clear()
    else:
        for state in get_args(State):
            JOBS.labels(state).set(counted.get(state, 0))
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", dependencies=[READ])
async def description(request: Request) -> dict[str, Any]:
    """The description of the API."""
    described: dict[str, Any] = request.app.openapi()
    return described
