"""A running service without keys answers no web page, and no client behind a proxy that announces itself."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.requests import CALLS, Call
from support.service import running, settings_in


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        running(settings_in(tmp_path_factory.mktemp("service"))) as (url, _),
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("call", [call for call in CALLS if call.scope], ids=lambda call: f"{call.method} {call.path}")
def test_requests_of_other_pages_are_refused(call: Call, client: httpx.Client) -> None:
    pages = [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
        {"Origin": "http://evil.example"},
    ]
    for headers in (*pages, {"X-Forwarded-For": "203.0.113.5"}):
        reply = call.ask(client, "0" * 32, headers)
        assert reply.status_code == 403
        assert not any(name.startswith("access-control-") for name in reply.headers)


def test_preflight_requests_are_refused(client: httpx.Client) -> None:
    """A browser asks first before it sends JSON, or PUT, PATCH and DELETE, to another origin."""
    wanted = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    reply = client.options("/v1/jobs", headers=wanted)
    assert reply.status_code == 405
    assert not any(name.startswith("access-control-") for name in reply.headers)


def test_requests_of_this_machine_are_answered(client: httpx.Client) -> None:
    assert client.get("/v1/jobs").status_code == 200
    assert client.get("/v1/jobs", headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 200
