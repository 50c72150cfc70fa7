"""Every route without a key, and with wrong keys. A route missing in `support.service.rest` fails here."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.service import client_at
from support.service.postgres import shared_on_sqlite
from support.service.rest import CALLS, IF_MATCH, Call, bearer, routes, submit, until_over

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
