"""Errors as problem documents (RFC 9457).

Each says what is wrong in one sentence, without a traceback and never with all that was sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from optpipe.errors import InputError, complained, field_path

log = logging.getLogger("optpipe.server")

LONGEST_DETAIL = 500  # characters


class ReplyError(Exception):
    """A request that is refused, with an HTTP status and a sentence."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def problem_document(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    if len(detail) > LONGEST_DETAIL:
        detail = detail[: LONGEST_DETAIL - 3] + "..."
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(content, status, headers, media_type="application/problem+json")


def _refusal(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ReplyError)
    return problem_document(error.status, error.detail, error.headers)


def _input(_request: Request, error: Exception) -> JSONResponse:
    return problem_document(422, str(error))


def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem_document(error.status_code, f"{error.detail}.", error.headers)


def _parameter(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    complaint: Any = error.errors()[0]
    return problem_document(422, complained(complaint, field_path(complaint["loc"][1:])))


def _database(_request: Request, error: Exception) -> JSONResponse:
    log.error("the database failed: %s", getattr(error, "orig", None) or error)
    return problem_document(503, "The database cannot be used at the moment.", {"Retry-After": "5"})


def _unexpected(_request: Request, _error: Exception) -> JSONResponse:
    return problem_document(500, "An error in the service; its log says more.")


def install(app: FastAPI) -> None:
    """Turn every error of the app into a problem document."""
    for kind, handler in (
        (ReplyError, _refusal),
        (InputError, _input),
        (HTTPException, _http),
        (RequestValidationError, _parameter),
        (SQLAlchemyError, _database),
        (Exception, _unexpected),
    ):
        app.add_exception_handler(kind, handler)
