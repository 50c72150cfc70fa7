"""Every route without a key, with wrong keys, and with malformed headers, queries, bodies: one sentence, never a 5xx.

A route missing in `support.service.rest` fails here.
"""

from collections.abc import Callable, Iterator
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
from support.service import client_at, fake_service
from support.service.postgres import database_of, shared_on_sqlite
from support.service.rest import CALLS, IF_MATCH, PROBLEM, SCHEDULE, Call, bearer, routes, sound, submit, until_over

from optpipe_server.database.keys import SCOPES, Keys
from optpipe_server.http.replies import NO_ROUTE
from optpipe_server.http.server import Server

NOBODY = "0" * 32


@pytest.fixture(scope="module")
def keys(shared: tuple[str, Server]) -> Keys:
    keys = shared[1].service.keys
    keys.create("somebody", ["read"])  # so that one is wanted
    return keys


@pytest.fixture(scope="module")
def anybody(shared: tuple[str, Server], keys: Keys) -> Iterator[httpx.Client]:
    with client_at(shared[0]) as client:
        yield client


def name(call: Call) -> str:
    return f"{call.method} {call.path}"


def test_every_route_is_listed(shared: tuple[str, Server]) -> None:
    listed = {(call.method, call.path): call.scope for call in CALLS}
    assert set(routes(shared[1].config.app)) == set(listed)
    open_paths = {"/healthz", "/readyz", "/"}  # the only ones that need no key
    assert {path for (_, path), scope in listed.items() if scope is None} == open_paths


def test_every_other_route_needs_a_valid_key(anybody: httpx.Client) -> None:
    for call in (each for each in CALLS if each.scope):
        for headers in ({}, bearer(f"op_{'0' * 16}_{'0' * 48}")):
            assert call.ask(anybody, NOBODY, headers).status_code == 401, name(call)


def test_a_key_with_just_the_scope_is_answered(anybody: httpx.Client, client: httpx.Client, keys: Keys) -> None:
    job_id = until_over(client, submit(client, method="prove"))["id"]
    scoped = {scope: bearer(keys.create("scoped", [scope])) for scope in SCOPES}
    for call in CALLS:
        version = {}
        if IF_MATCH in call.headers.values():
            version = {"If-Match": client.get(f"/v1/jobs/{job_id}").headers["etag"]}
        if call.scope:
            other = scoped["read" if call.scope == "admin" else "admin"]
            refused = call.ask(anybody, job_id, version | other)
            assert refused.status_code == 403, name(call)
            assert f'scope="{call.scope}"' in refused.headers["www-authenticate"]
        reply = call.ask(anybody, job_id, version | (scoped[call.scope] if call.scope else {}))
        assert reply.status_code == call.status, (name(call), reply.text)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "server" not in reply.headers
        if call.method == "GET" and call.path != "/" and not call.path.endswith(("{seq}", "best")):
            assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("asked", "status", "detail", "allow"),
    [
        ("PUT /v1/jobs", 405, "The route does not have this method; expected GET, POST.", "GET, POST"),
        ("POST /healthz", 405, "The route does not have this method; expected GET.", "GET"),
        *((f"GET {path}", 404, NO_ROUTE, None) for path in ("/v1", "/page", "/v1/jobs/", "/docs")),
        ("GET /v1/jobs?limit=0", 422, "limit = '0': input should be greater than or equal to 1", None),
        (
            "GET /v1/jobs?cursor=" + "1" * 99,
            422,
            f"cursor = '{'1' * 56}...: input should be less than or equal to 9007199254740992",
            None,
        ),
    ],
)
@shared_on_sqlite
def test_errors_tell_what_is_expected(
    client: httpx.Client, asked: str, status: int, detail: str, allow: str | None
) -> None:
    reply = client.request(*asked.split())
    assert (reply.status_code, reply.json()["detail"], reply.headers.get("allow")) == (status, detail, allow)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def taking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service, on each database, that accepts any number of jobs and solves none."""
    folder, asks_nobody = tmp_path_factory.mktemp("service"), {"solves": 0, "open_jobs": 10**6, "first_schedule_s": 1.0}
    with (
        database_of(request) as database,
        fake_service(folder, database, **asks_nobody) as (url, server),
        client_at(url, server.service.keys.create("taking", SCOPES)) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def over(taking: httpx.Client) -> str:
    """The id of a job that is over and has an incumbent."""
    reply = taking.post("/v1/jobs", json={"problem": PROBLEM, "method": "hang", "warm_start": SCHEDULE})
    assert reply.json()["best"]["seq"] == 1
    job_id: str = reply.json()["id"]
    assert taking.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    return job_id


@pytest.mark.parametrize("number", [2**31 - 1, 2**31, 2**53, 2**63, 2**64])
def test_numbers_for_which_a_column_is_too_small(number: int, taking: httpx.Client, over: str) -> None:
    for path in (f"incumbents?after={number}", f"log?after={number}", f"trace?seq={number}", f"incumbents/{number}"):
        sound(taking.get(f"/v1/jobs/{over}/{path}"))
    sound(taking.put(f"/v1/jobs/{over}/adoptions/{number}", json={"step": 1}))
    sound(taking.put(f"/v1/jobs/{over}/adoptions/1", json={"step": number}))
    sound(taking.patch(f"/v1/jobs/{over}", json={"time_limit_s": 1.0}, headers={"If-Match": f'"{number}"'}))
    sound(taking.get(f"/v1/jobs/{over}/events", headers={"Last-Event-ID": str(number)}))


@pytest.mark.parametrize("call", [call for call in CALLS if "{" in call.path], ids=name)
def test_paths(call: Call, taking: httpx.Client, over: str) -> None:
    odds = [
        *("%00", "%ff", "..", "%2e%2e%2f", "%0a", "'", "0", "-1", "9" * 30, "9" * 5000, "é"),
        *(over.upper(), f"{over}%00", f"{over}%2f"),
    ]
    for odd in odds:
        path = call.path.replace("{job_id}", odd).replace("{seq}", "1")
        reply = taking.request(call.method, path, json=call.body)
        sound(reply)
        assert reply.status_code in (404, 405)
        if "{seq}" in call.path:
            path = call.path.replace("{job_id}", over).replace("{seq}", odd)
            sound(taking.request(call.method, path, json=call.body))


CHECKS: list[Callable[..., Any]] = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
LONGEST_ERROR = 2**14  # bytes
many = [pytest.mark.soak, pytest.mark.timeout(3600)]


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
