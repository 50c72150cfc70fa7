"""The API's description. Routes read and write JSON themselves, so FastAPI cannot derive their bodies and replies."""

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
ANY_ROUTE = (400, 401, 403, 413, 415, 503)  # errors of `auth` and `limits`, except for /healthz and /readyz

_models: set[type[BaseModel]] = {ProblemDocument}


def responses(ok: int, model: type[BaseModel] | None, example: Any, *errors: int, **described: str) -> Described:
    """Describe the replies of a route.

    Parameters
    ----------
    ok, model, example
        The status of success, its body, and an example of that.
    errors
        Statuses of problem documents, besides those in `ANY_ROUTE`.
    described
        Replies without a body, such as `_304="why"`.
    """
    return {
        ok: {
            "description": HTTPStatus(ok).phrase,
            **({"content": _content("application/json", model, example)} if model else {}),
        },
        **{status: _problem(status) for status in sorted({*ANY_ROUTE, *errors})},
        **{int(status[1:]): {"description": why} for status, why in described.items()},
    }


def body(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """Describe the body that a route reads."""
    return {"requestBody": {"required": True, "content": _content("application/json", model, example)}}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` describe the models that routes name."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            for operation in (operation for methods in described["paths"].values() for operation in methods.values()):
                if "application/json" in operation["responses"].get("422", {}).get("content", {}):
                    # FastAPI adds it to routes whose only parameters are texts, which cannot be wrong.
                    del operation["responses"]["422"]
            ours = sorted(_models, key=lambda model: model.__name__)
            _, schemas = models_json_schema([(model, "validation") for model in ours], ref_template=REFERENCE)
            components = described.setdefault("components", {})
            components["schemas"] = schemas["$defs"]
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "op_<id>_<secret>"}
            }
            described["security"] = [{"key": []}, {}]  # no key is needed if the database has none
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
