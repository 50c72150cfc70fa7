"""Every error as a problem document (RFC 9457): one sentence, without a traceback and never with all that was sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from optpipe.errors import InputError, complained, field_path, input_error
from optpipe.model.records import Record
from optpipe_server.database.changes import ConflictError, KeyReusedError, MissingError, StaleError, TooManyOpenError
from optpipe_server.database.sqlite import UnusableError
from optpipe_server.pool import TaskError

log = logging.getLogger("optpipe.server")

LONGEST_DETAIL = 500  # characters
NO_ROUTE = "There is no such route; GET /openapi.json describes all routes."
AWAY = "The database cannot be used at the moment."
ENDING = "The service is about to end."
SOON_S = 5  # when a client should ask again


class ReplyError(HTTPException):
    """A request that is refused, with an HTTP status and a sentence; with `retry_s` it may be sent again by then."""

    def __init__(
        self, status: int, detail: str, headers: Mapping[str, str] | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(status, detail, headers if retry_s is None else {"Retry-After": str(retry_s)})


class ProblemDocument(Record):
    """What went wrong (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


# What every route may answer besides its own reply, for the API's description.
ANY_ERROR: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "What is wrong, in one sentence",
        "content": {"application/problem+json": {"schema": ProblemDocument.model_json_schema()}},
    }
}


def problem_document(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    if len(detail) > LONGEST_DETAIL:
        detail = detail[: LONGEST_DETAIL - 3] + "..."
    detail = detail.encode(errors="replace").decode()  # without lone surrogates, which no reply can have
    document = ProblemDocument(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(document.model_dump(), status, headers, media_type="application/problem+json")


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def _with_message(status: int, headers: Mapping[str, str] | None = None) -> Handler:
    """A handler whose reply has the error's message."""

    async def handle(_request: Request, error: Exception) -> Response:
        return problem_document(status, str(error), headers)

    return handle


async def _refused(request: Request, error: HTTPException) -> Response:
    detail, headers = f"{error.detail}.", dict(error.headers or {})
    if isinstance(error, ReplyError):
        detail = error.detail
    elif error.status_code == 404:
        detail = NO_ROUTE
    elif error.status_code == 405:
        methods = ("DELETE", "GET", "PATCH", "POST", "PUT")
        scopes = {method: {**request.scope, "method": method} for method in methods}
        routes = request.app.routes
        allowed = [m for m in methods if any(route.matches(scopes[m])[0] == Match.FULL for route in routes)]
        headers["Allow"] = ", ".join(allowed if not request.url.path.startswith("/page/") else ("GET",))
        detail = f"The route does not have this method; expected {headers['Allow']}."
    return problem_document(error.status_code, detail, headers)


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    """Name what is wrong with a parameter or with the body."""
    complaint: Any = error.errors()[0]
    where, *path = complaint["loc"]
    if where != "body":
        return problem_document(422, complained(complaint, field_path(tuple(path))))
    if complaint["type"] == "json_invalid":
        return problem_document(400, "The body is not valid JSON.")
    if isinstance(error.body, bytes):
        return problem_document(415, "Content-Type must be application/json.")
    model = request.scope["route"].body_field.field_info.annotation
    try:
        model.model_validate(error.body)  # again, because its own error is more exact than FastAPI's
    except ValidationError as wrong:
        return problem_document(422, str(input_error(wrong, "body", model)))
    return problem_document(422, "body: it is missing")


async def _database_failed(_request: Request, error: SQLAlchemyError) -> Response:
    why = getattr(error, "orig", None) or error
    log.error("the database failed: %s", why)
    detail = f"The database cannot be used: {why}." if isinstance(error, UnusableError) else AWAY
    return problem_document(503, detail, {"Retry-After": str(SOON_S)})


async def _unexpected(_request: Request, _error: Exception) -> Response:
    return problem_document(500, "An error in the service; its log says more.")


HANDLERS: dict[int | type[Exception], Handler] = {
    HTTPException: _refused,
    RequestValidationError: _invalid,
    InputError: _with_message(422),
    KeyReusedError: _with_message(422),
    MissingError: _with_message(404),
    ConflictError: _with_message(409),
    StaleError: _with_message(412),
    TooManyOpenError: _with_message(429, {"Retry-After": "10"}),
    TaskError: _with_message(503, {"Retry-After": "10"}),
    SQLAlchemyError: _database_failed,
    Exception: _unexpected,
}
