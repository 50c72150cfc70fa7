"""The API's description: bodies are read and replies written by ourselves, so what FastAPI would derive is said
here."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from optpipe_server.http.schemas import ProblemDocument

Described = dict[int | str, dict[str, Any]]

REFERENCE = "#/components/schemas/{model}"
GUARDED = (400, 401, 403, 413, 415, 503)  # what any route but /healthz and /readyz may say, see `guard` and `limits`

_models: set[type[BaseModel]] = {ProblemDocument}


def replies(ok: int, model: type[BaseModel] | None, example: Any, *errors: int, **described: str) -> Described:
    """The replies of a route: `ok` with its model, and problem documents; `described` names others without a body, as
    `_304="why"`."""
    return {
        ok: {
            "description": HTTPStatus(ok).phrase,
            **({"content": _content("application/json", model, example)} if model else {}),
        },
        **{status: _problem(status) for status in sorted({*GUARDED, *errors})},
        **{int(status[1:]): {"description": why} for status, why in described.items()},
    }


def body(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """The body that a route reads."""
    return {"requestBody": {"required": True, "content": _content("application/json", model, example)}}


def install(app: FastAPI) -> None:
    """`app.openapi()` with the models that routes name."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            for operation in (operation for methods in described["paths"].values() for operation in methods.values()):
                if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                    del operation["responses"][
                        "422"
                    ]  # FastAPI's own: nothing but text is asked for, which cannot be wrong
            ours = sorted(_models, key=lambda model: model.__name__)
            _, schemas = models_json_schema([(model, "validation") for model in ours], ref_template=REFERENCE)
            components = described.setdefault("components", {})
            components["schemas"] = schemas["$defs"]
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "op_<id>_<secret>"}
            }
            described["security"] = [{"key": []}, {}]  # without any key in the database none is asked for
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _problem(status: int) -> dict[str, Any]:
    phrase = HTTPStatus(status).phrase
    example = {"type": "about:blank", "title": phrase, "status": status, "detail": "One sentence."}
    return {"description": phrase, "content": _content("application/problem+json", ProblemDocument, example)}


def _content(kind: str, model: type[BaseModel], example: Any) -> dict[str, Any]:
    _models.add(model)
    return {kind: {"schema": {"$ref": REFERENCE.format(model=model.__name__)}, "example": example}}
