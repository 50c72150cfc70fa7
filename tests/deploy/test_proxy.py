"""The service behind nginx as `deploy/nginx.conf` sets it up: whole requests reach it, half ones keep nobody out."""

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support.deployment import ROOT
from support.processes import allow_files, free_port, until
from support.service import client_at, events, fake_service
from support.service.rest import PROBLEM

from optpipe_server.database.keys import SCOPES
from optpipe_server.http.app import LONGEST_BODY

FLOOD = 2800
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, int]]:
    """A client of the proxy with a key, and the proxy's port."""
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None and "OPTPIPE_REQUIRE_BROWSER" not in os.environ:
        pytest.skip("there is no nginx here")
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    with fake_service(folder) as (url, server), client_at(url) as direct:
        text = (ROOT / "deploy/nginx.conf").read_text()
        for name, here in (
            ("127.0.0.1:8000", url.removeprefix("http://")),
            ("listen 8080", f"listen 127.0.0.1:{port}"),
            ("/run/optpipe-nginx.pid", str(folder / "pid")),
            ("timeout 10s", "timeout 1s"),
        ):
            assert name in text
            text = text.replace(name, here)
        (folder / "nginx.conf").write_text(text)
        started = subprocess.Popen([str(nginx), "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"])
        try:
            with client_at(f"http://127.0.0.1:{port}") as refused:
                until(lambda: answers(refused))
                assert direct.get("/v1/jobs").status_code == 200
                reply = refused.get("/v1/jobs", headers={"Host": "optpipe.example"})
                assert reply.status_code == 403, "without keys the name of another host is not answered"
            with client_at(f"http://127.0.0.1:{port}", server.service.keys.create("proxied", SCOPES)) as client:
                yield client, port
        finally:
            started.terminate()
            started.wait(60)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.ConnectError:
        return False


def test_jobs_events_and_long_bodies_pass(proxied: tuple[httpx.Client, int]) -> None:
    client, _ = proxied
    job = client.post("/v1/jobs", json={"problem": PROBLEM, "method": "hang"}).json()
    with client.stream("GET", f"{job['url']}/events") as response:
        stream = events(response)
        assert next(stream)["id"] == "1", "an event is not held back"
        assert client.post(f"{job['url']}/cancel").status_code == 202
        assert [each["event"] for each in stream] == ["end"]
    assert client.post("/v1/jobs", content=b"x" * (LONGEST_BODY + 1)).status_code == 413
    reply = client.post(
        "/v1/diagnose", content=b"x" * (LONGEST_BODY + 1), headers={"Content-Type": "application/octet-stream"}
    )
    assert reply.status_code == 422, reply.text


def test_half_requests_end_soon_and_keep_nobody_out(proxied: tuple[httpx.Client, int]) -> None:
    client, port = proxied
    allow_files(2 * FLOOD)
    with ExitStack() as stack:
        halves: list[Any] = []
        for half in (b"", b"GET /hea", HEAD, HEAD + b"Content-Length: 1000\r\n\r\n{"):
            for _ in range(FLOOD // 4):
                halves.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)))
                halves[-1].sendall(half)
        assert client.get("/v1/jobs").status_code == 200
        ends = Counter(each.recv(65536)[:12] for each in halves)
        assert ends.keys() <= {
            b"",
            b"HTTP/1.1 408",
            b"HTTP/1.1 503",
        }  # the last are more bodies than one client may send


def test_no_request_is_smuggled(proxied: tuple[httpx.Client, int]) -> None:
    """Length and chunks at once: the proxy and the service might see different ends of the first request."""
    _, port = proxied
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1
