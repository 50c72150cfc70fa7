"""Authentication alone, before an app that answers everything: who is let in, as whom, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy.exc import OperationalError
from starlette.middleware.authentication import AuthenticationMiddleware
from support.service.requests import bearer

from optpipe_server.database import Database
from optpipe_server.database.keys import SCOPES, Keys, KnownKeys
from optpipe_server.http import app as http_app
from optpipe_server.http import auth
from optpipe_server.http.app import BoundedBody
from optpipe_server.http.replies import HANDLERS

WHERE = [(auth.READ, "GET", "/v1/jobs"), (auth.SUBMIT, "POST", "/v1/jobs"), (auth.ADMIN, "GET", "/metrics")]


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    database = Database(f"sqlite:///{tmp_path / 'keys.sqlite'}")
    yield Keys(database)
    database.close()


@pytest.fixture
def app(keys: Keys) -> FastAPI:
    """Routes that answer who asks, one for each scope, and no service behind them."""
    app = FastAPI(openapi_url=None, exception_handlers=HANDLERS)
    app.add_middleware(BoundedBody)
    app.add_middleware(AuthenticationMiddleware, backend=auth.Callers(keys), on_error=auth.refused)

    async def answer(request: Request) -> dict[str, Any]:
        name, scopes = request.user.display_name, sorted(request.auth.scopes)
        return {"name": name or None, "scopes": scopes, "body": (await request.body()).decode()}

    for scope, method, path in WHERE:
        app.add_api_route(path, answer, methods=[method], dependencies=[scope])
    return app


class Local:
    """A client in the app's own process, which sets its own address."""

    def __init__(self, app: FastAPI, run: Callable[..., Any]) -> None:
        self._app, self._run = app, run

    def ask(self, method: str, path: str, headers: Any = None, content: Any = None, peer: str = "127.0.0.1") -> Any:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=(peer, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, headers=headers, content=content)

        return self._run(asked())

    def get(self, path: str, headers: Any = None, peer: str = "127.0.0.1") -> Any:
        return self.ask("GET", path, headers, peer=peer)

    def post(self, path: str, headers: Any = None, content: Any = None) -> Any:
        return self.ask("POST", path, headers, content)


@pytest.fixture
def client(app: FastAPI) -> Iterator[Local]:
    with asyncio.Runner() as runner:
        yield Local(app, runner.run)


def test_without_keys_this_machine_may_do_everything(client: Local) -> None:
    for host, peer in (
        ("localhost", "127.0.0.1"),
        ("127.0.0.1:8000", "127.0.0.2"),
        ("[::1]:8000", "::1"),
        ("LOCALHOST:1", "127.0.0.1"),
    ):
        assert client.get("/v1/jobs", {"Host": host}, peer).json() == {
            "name": None,
            "scopes": sorted(SCOPES),
            "body": "",
        }


@pytest.mark.parametrize(
    "host",
    ["evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]", "x["],
)
def test_without_keys_pages_of_another_host_are_refused(client: Local, host: str) -> None:
    """DNS rebinding: the page's host name leads to 127.0.0.1, and the browser sends that name."""
    reply = client.get("/v1/jobs", {"Host": host})
    assert reply.status_code == 403
    assert reply.json()["detail"].startswith("Host:")


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "https://localhost", "null", ""])
def test_without_keys_pages_of_another_origin_are_refused(client: Local, origin: str) -> None:
    assert client.post("/v1/jobs", {"Origin": origin}).status_code == 403
    assert client.get("/v1/jobs", {"Host": "localhost:8000", "Origin": "http://localhost:8000"}).status_code == 200


def test_without_keys_other_machines_are_refused(client: Local) -> None:
    assert client.get("/v1/jobs", peer="10.0.0.9").status_code == 403


def test_with_a_key_any_host_and_machine_is_answered(client: Local, keys: Keys) -> None:
    key = keys.create("lab", ["read"])
    reply = client.get("/v1/jobs", bearer(key) | {"Host": "optpipe.example"}, "10.0.0.9")
    assert reply.json() == {"name": "lab", "scopes": ["read"], "body": ""}


def test_once_there_is_a_key_one_is_required(client: Local, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "REMEMBERED_S", 0.0)
    assert client.get("/v1/jobs").status_code == 200
    key = keys.create("lab", ["read"])
    reply = client.get("/v1/jobs")
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == 'Bearer realm="optpipe"'
    assert reply.headers["content-type"] == "application/problem+json"
    keys.revoke(key.split("_")[1])
    assert client.get("/v1/jobs").status_code == 401  # a service that had keys does not open


def test_an_absent_database_lets_nobody_pass_without_a_key(client: Local, keys: Keys) -> None:
    keys.create("acme", ["read"])
    read = keys.read

    def away() -> KnownKeys:
        keys.read = read  # type: ignore[method-assign]
        raise OperationalError("", None, Exception("away"))

    keys.read = away  # type: ignore[method-assign]
    assert [client.get("/v1/jobs").status_code for _ in range(2)] == [503, 401]


def test_malformed_keys(client: Local, keys: Keys) -> None:
    right = keys.create("lab", SCOPES)
    _, key_id, secret = right.split("_")
    for sent in (
        f"Bearer {right[:-1]}",
        f"Bearer {right}, Bearer {right}",
        f"Bearer op_{key_id}_",
        f"Basic {right}",
        f"{right}",
        "",
        "Bearer",
        "Bearer " + "x" * 5000,
        b"Bearer \xff\x00",
    ):
        reply = client.get("/v1/jobs", {"Authorization": sent})
        assert reply.status_code == 401, sent
        assert secret not in reply.text
    assert client.get("/v1/jobs", [("Authorization", f"Bearer {right}")] * 2).status_code == 401
    assert client.get("/v1/jobs", {"Authorization": f"bEARER  {right}"}).status_code == 200


def test_a_revoked_key_is_rejected_within_seconds(client: Local, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    key, clock = keys.create("lab", ["read"]), [100.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: clock[0])
    assert client.get("/v1/jobs", headers=bearer(key)).status_code == 200
    keys.revoke(key.split("_")[1])
    clock[0] += auth.REMEMBERED_S + 0.1
    assert client.get("/v1/jobs", headers=bearer(key)).status_code == 401


def test_made_up_keys_hold_nobody_up_and_a_new_one_works_at_once(app: FastAPI, keys: Keys) -> None:
    """While a query for made-up keys hangs, a key that is known is answered; all of them wait for a few queries."""
    known = keys.create("lab", ["read"])
    read, go_on, queries = keys.read, threading.Event(), []

    def slowly() -> KnownKeys:
        queries.append(1)
        if len(queries) > 1:
            go_on.wait(60)
        return read()

    keys.read = slowly  # type: ignore[method-assign]

    async def flood() -> tuple[int, list[int], int]:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask(key: str) -> int:
                return (await client.get("/v1/jobs", headers=bearer(key))).status_code

            assert await ask(known) == 200
            made_up = [asyncio.create_task(ask(f"op_{n:016x}_{'0' * 48}")) for n in range(200)]
            while len(queries) < 2:
                await asyncio.sleep(0.01)
            answered = await ask(known)
            assert not any(task.done() for task in made_up)
            go_on.set()
            statuses = await asyncio.gather(*made_up)
            return answered, statuses, await ask(keys.create("new", ["read"]))

    answered, statuses, new = asyncio.run(flood())
    assert (answered, {*statuses}, new) == (200, {401}, 200)
    assert len(queries) <= 4


def test_a_scope_allows_its_routes_only(client: Local, keys: Keys) -> None:
    for scope in SCOPES:
        key = keys.create("lab", [scope])
        for wanted, method, path in WHERE:
            reply = client.ask(method, path, bearer(key))
            assert reply.status_code == (200 if [scope] == wanted.scopes else 403)
            if reply.status_code == 403:
                assert f'scope="{wanted.scopes[0]}"' in reply.headers["www-authenticate"]


def test_a_body_is_as_long_as_it_may_be_and_arrives_in_time(client: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "LONGEST_BODY", 10)
    monkeypatch.setattr(http_app, "ARRIVES_S", 0.5)

    async def chunks(then: bytes, after_s: float = 0.0) -> AsyncIterator[bytes]:
        yield b"012345678"
        await asyncio.sleep(after_s)
        yield then

    assert client.post("/v1/jobs", content=chunks(b"9")).json()["body"] == "0123456789"
    for long in (b"0123456789a", chunks(b"9a")):
        reply = client.post("/v1/jobs", content=long)
        assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert client.post("/v1/jobs", content=chunks(b"9", 2.0)).status_code == 408
    assert client.post("/v1/jobs").status_code == 200  # there is none
