"""Every route without a key, with wrong keys and with another tenant's. A route missing in `support.service.requests`
fails here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import httpx
import pytest
from support.service import client_at
from support.service.postgres import shared_on_sqlite
from support.service.requests import CALLS, IF_MATCH, PROBLEM, Call, bearer, job, routes

from optpipe_server.database.keys import SCOPES, Keys
from optpipe_server.http.replies import NO_ROUTE
from optpipe_server.http.server import Server

OF_JOB = [call for call in CALLS if call.of_job]
NOBODY = "0" * 32

_numbers = count()


@pytest.fixture(scope="module")
def keys(shared: tuple[str, Server]) -> Keys:
    keys = shared[1].service.keys
    keys.create("somebody", ["read"])  # so that one is wanted
    return keys


@pytest.fixture(scope="module")
def anybody(shared: tuple[str, Server], keys: Keys) -> Iterator[httpx.Client]:
    """A client that sends exactly the headers it is given."""
    with client_at(shared[0]) as client:
        yield client


@pytest.fixture
def tenant(shared: tuple[str, Server], keys: Keys) -> Iterator[Callable[[], httpx.Client]]:
    """Clients of new tenants."""
    clients = []

    def made() -> httpx.Client:
        clients.append(client_at(shared[0], keys.create(f"tenant-{next(_numbers)}", SCOPES)))
        return clients[-1]

    yield made
    for client in clients:
        client.close()


def name(call: Call) -> str:
    return f"{call.method} {call.path}"


def test_every_route_is_listed(shared: tuple[str, Server]) -> None:
    listed = {(call.method, call.path): call.scope for call in CALLS}
    assert set(routes(shared[1].config.app)) == set(listed)
    open_paths = {"/healthz", "/readyz", "/", "/page/{name:path}"}  # the only ones that need no key
    assert {path for (_, path), scope in listed.items() if scope is None} == open_paths


def test_every_other_route_needs_a_valid_key(anybody: httpx.Client) -> None:
    for call in (each for each in CALLS if each.scope):
        for headers in ({}, bearer(f"op_{'0' * 16}_{'0' * 48}")):
            assert call.ask(anybody, NOBODY, headers).status_code == 401, name(call)


def test_the_jobs_tenant_is_answered(anybody: httpx.Client, tenant: Callable[[], httpx.Client], keys: Keys) -> None:
    """With a key of just the scope that is needed."""
    whole = tenant()
    job_id, owner = job(whole), f"tenant-{next(_numbers) - 1}"
    scoped = {scope: bearer(keys.create(owner, [scope])) for scope in SCOPES}
    for call in CALLS:
        version = (
            {"If-Match": whole.get(f"/v1/jobs/{job_id}").headers["etag"]} if IF_MATCH in call.headers.values() else {}
        )
        reply = call.ask(anybody, job_id, version | (scoped[call.scope] if call.scope else {}))
        assert reply.status_code == call.status, (name(call), reply.text)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "server" not in reply.headers
        assert (
            call.method != "GET"
            or call.path.endswith(("{seq}", "best"))
            or call.path == "/"  # which has no secrets
            or reply.headers["cache-control"] == "no-store"
        )


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
    tenant: Callable[[], httpx.Client], asked: str, status: int, detail: str, allow: str | None
) -> None:
    reply = tenant().request(*asked.split())
    assert (reply.status_code, reply.json()["detail"], reply.headers.get("allow")) == (status, detail, allow)


def test_another_tenants_job_is_404(tenant: Callable[[], httpx.Client]) -> None:
    """The reply is the same as for a job that does not exist, and the job does not change."""
    own, other = tenant(), tenant()
    job_id = job(own)
    before = own.get(f"/v1/jobs/{job_id}"), own.get(f"/v1/jobs/{job_id}/log")
    for call in OF_JOB:
        version = {"If-Match": before[0].headers["etag"]} if IF_MATCH in call.headers.values() else {}
        for headers in ({}, {"Last-Event-ID": "99"}, {"If-None-Match": before[0].headers["etag"]}):
            theirs, none = (call.ask(other, which, {**version, **headers}) for which in (job_id, NOBODY))
            assert (theirs.status_code, theirs.content) == (404, none.content), name(call)
            assert {**theirs.headers, "date": ""} == {**none.headers, "date": ""}
    assert [reply.content for reply in before] == [
        own.get(f"/v1/jobs/{job_id}").content,
        own.get(f"/v1/jobs/{job_id}/log").content,
    ]


def test_tenants_are_separate(tenant: Callable[[], httpx.Client]) -> None:
    """Lists and their cursors, idempotency keys, cached schedules."""
    own, other = tenant(), tenant()
    said, body = {"Idempotency-Key": f"key-{next(_numbers)}"}, {"problem": PROBLEM, "method": "prove"}
    mine = {job(own), own.post("/v1/jobs", json=body, headers=said).json()["id"]}
    assert own.post("/v1/jobs", json=body, headers=said).status_code == 200
    assert other.post("/v1/cache/lookup", json={"problem": PROBLEM}).json() == {"hit": None}
    theirs = other.post("/v1/jobs", json={**body, "gap": 0.5}, headers=said)
    assert theirs.status_code == 201  # though the key came with another body before, from the other one
    assert theirs.json()["best"]["source"] != "cache"  # though the other one's cache has a better one
    following = own.get("/v1/jobs", params={"limit": 1}).json()["next"]
    for address in ("/v1/jobs", following, following.replace("limit=1", "limit=200")):
        assert {listed["id"] for listed in own.get(address).json()["jobs"]} <= mine
        assert {listed["id"] for listed in other.get(address).json()["jobs"]} <= {theirs.json()["id"]}
    assert own.post("/v1/cache/lookup", json={"problem": PROBLEM}).json()["hit"]["exact"]
