"""The API against its own description (schemathesis): described and undescribed requests get described replies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: list[Callable[..., Any]] = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
LONGEST_ERROR = 2**14  # bytes


many = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("taking", "examples", "least"),
    [
        pytest.param("sqlite", 4, 125, id="sqlite-few"),
        pytest.param("sqlite", 300, 10_000, id="sqlite-many", marks=many),
        pytest.param("postgresql", 300, 10_000, id="postgresql-many", marks=many),
    ],
    indirect=["taking"],
)
def test_the_service_follows_its_description(examples: int, least: int, taking: httpx.Client, over: str) -> None:
    described = schemathesis.openapi.from_dict(taking.get("/openapi.json").json())
    headers = {"Authorization": taking.headers["Authorization"]}
    asked = 0

    def ask(case: schemathesis.Case, real: bool) -> None:
        nonlocal asked
        if real and "job_id" in case.path_parameters:
            case.path_parameters["job_id"] = over
        if "wait" in (case.query or {}):
            case.query["wait"] = 0  # nothing will happen
        response = case.call(base_url=str(taking.base_url), headers=headers, timeout=240)
        # The body of a stream is described as the text it is; schemathesis would have each event be one.
        stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        case.validate_response(
            response, checks=[check for check in CHECKS if not (stream and check is response_schema_conformance)]
        )
        assert response.status_code < 400 or len(response.content) <= LONGEST_ERROR
        asked += 1

    for operation in (found.ok() for found in described.get_all_operations()):
        read = [*operation.body, *operation.query, *operation.headers]
        for mode in GenerationMode if read else [GenerationMode.POSITIVE]:  # what reads nothing cannot be asked wrongly
            cases = operation.as_strategy(generation_mode=mode)
            tried = given(case=cases, real=st.booleans() if operation.method != "delete" else st.just(False))(ask)
            with suppress(Unsatisfiable):  # nor what reads any text
                settings(
                    max_examples=examples,
                    suppress_health_check=list(HealthCheck),
                    database=None,
                    phases=[Phase.generate],
                )(tried)()
    assert asked >= least
