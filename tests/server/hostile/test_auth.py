"""Authentication alone, before an app that answers everything: who is let in, as whom, and for how long."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy.exc import OperationalError
from starlette.middleware.authentication import AuthenticationMiddleware
from support.service.rest import bearer

from optpipe_server.database import Database
from optpipe_server.database.keys import SCOPES, Keys, KnownKeys
from optpipe_server.http import app as http_app
from optpipe_server.http import auth
from optpipe_server.http.app import BoundedBody
from optpipe_server.http.replies import HANDLERS


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    with closing(Database(f"sqlite:///{tmp_path / 'keys.sqlite'}")) as database:
        yield Keys(database)


@pytest.fixture
def app(keys: Keys) -> FastAPI:
    """A route that answers who asks, and no service behind it."""
    app = FastAPI(openapi_url=None, exception_handlers=HANDLERS)
    app.add_middleware(BoundedBody)
    app.add_middleware(AuthenticationMiddleware, backend=auth.Callers(keys), on_error=auth.refused)

    async def answer(request: Request) -> dict[str, Any]:
        name, scopes = request.user.display_name, sorted(request.auth.scopes)
        return {"name": name or None, "scopes": scopes, "body": (await request.body()).decode()}

    app.add_api_route("/v1/jobs", answer, methods=["GET", "POST"])
    return app


Ask = Callable[..., Any]


def client_of(app: FastAPI, peer: str = "127.0.0.1") -> httpx.AsyncClient:
    """A client in the app's own process, which sets its own address."""
    transport = httpx.ASGITransport(app, client=(peer, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def ask(app: FastAPI) -> Iterator[Ask]:
    with asyncio.Runner() as runner:

        async def reply(headers: Any = None, peer: str = "127.0.0.1", method: str = "GET", content: Any = None) -> Any:
            async with client_of(app, peer) as client:
                return await client.request(method, "/v1/jobs", headers=headers, content=content)

        yield lambda *arguments, **named: runner.run(reply(*arguments, **named))


def test_without_keys_this_machine_may_do_everything(ask: Ask) -> None:
    whole = {"name": None, "scopes": sorted(SCOPES), "body": ""}
    for host, peer in (
        ("localhost", "127.0.0.1"),
        ("127.0.0.1:8000", "127.0.0.2"),
        ("[::1]:8000", "::1"),
        ("LOCALHOST:1", "127.0.0.1"),
    ):
        assert ask({"Host": host}, peer).json() == whole
    assert ask({"Host": "localhost:8000", "Origin": "http://localhost:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "values", "peer"),
    [
        # DNS rebinding: the page's host name leads to 127.0.0.1, and the browser sends that name.
        ("Host", ["evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]", "x["], "127.0.0.1"),
        ("Origin", ["http://evil.example", "http://localhost:3000", "https://localhost", "null", ""], "127.0.0.1"),
        ("Host", ["localhost"], "10.0.0.9"),
    ],
)
def test_without_keys_other_machines_and_pages_are_refused(ask: Ask, name: str, values: list[str], peer: str) -> None:
    for value in values:
        reply = ask({name: value}, peer)
        assert reply.status_code == 403
        assert reply.json()["detail"].startswith("A service" if peer != "127.0.0.1" else f"{name}:")


def test_once_there_is_a_key_one_is_required(ask: Ask, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one and a revoked one count within seconds."""
    clock = [100.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: clock[0])
    assert ask().status_code == 200
    key = keys.create("lab", ["read"])
    clock[0] += auth.REMEMBERED_S + 0.1
    reply = ask()
    assert (reply.status_code, reply.headers["content-type"]) == (401, "application/problem+json")
    assert reply.headers["www-authenticate"] == 'Bearer realm="optpipe"'
    reply = ask(bearer(key) | {"Host": "optpipe.example"}, "10.0.0.9")  # any host and machine
    assert reply.json() == {"name": "lab", "scopes": ["read"], "body": ""}
    keys.revoke(key.split("_")[1])
    clock[0] += auth.REMEMBERED_S + 0.1
    assert (ask(bearer(key)).status_code, ask().status_code) == (401, 401)  # a service that had keys does not open


def test_an_absent_database_lets_nobody_pass_without_a_key(ask: Ask, keys: Keys) -> None:
    keys.create("acme", ["read"])
    read = keys.read

    def away() -> KnownKeys:
        keys.read = read  # type: ignore[method-assign]
        raise OperationalError("", None, Exception("away"))

    keys.read = away  # type: ignore[method-assign]
    assert [ask().status_code for _ in range(2)] == [503, 401]


def test_malformed_keys(ask: Ask, keys: Keys) -> None:
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
        reply = ask({"Authorization": sent})
        assert reply.status_code == 401, sent
        assert secret not in reply.text
    assert ask([("Authorization", f"Bearer {right}")] * 2).status_code == 401
    assert ask({"Authorization": f"bEARER  {right}"}).status_code == 200


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
        async with client_of(app) as client:

            async def status(key: str) -> int:
                return (await client.get("/v1/jobs", headers=bearer(key))).status_code

            assert await status(known) == 200
            made_up = [asyncio.create_task(status(f"op_{n:016x}_{'0' * 48}")) for n in range(200)]
            while len(queries) < 2:
                await asyncio.sleep(0.01)
            answered = await status(known)
            assert not any(task.done() for task in made_up)
            go_on.set()
            statuses = await asyncio.gather(*made_up)
            return answered, statuses, await status(keys.create("new", ["read"]))

    answered, statuses, new = asyncio.run(flood())
    assert (answered, {*statuses}, new) == (200, {401}, 200)
    assert len(queries) <= 4


def test_a_body_is_as_long_as_it_may_be_and_arrives_in_time(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "LONGEST_BODY", 10)
    monkeypatch.setattr(http_app, "ARRIVES_S", 0.5)

    async def chunks(then: bytes, after_s: float = 0.0) -> AsyncIterator[bytes]:
        yield b"012345678"
        await asyncio.sleep(after_s)
        yield then

    assert ask(method="POST", content=chunks(b"9")).json()["body"] == "0123456789"
    for long in (b"0123456789a", chunks(b"9a")):
        reply = ask(method="POST", content=long)
        assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert ask(method="POST", content=chunks(b"9", 2.0)).status_code == 408
    assert ask(method="POST").status_code == 200  # there is none
