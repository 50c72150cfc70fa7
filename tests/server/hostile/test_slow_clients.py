"""Raw sockets: endless requests, unread streams, bytes that are not HTTP. Other clients are answered all the same."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from support.processes import allow_files, until
from support.service import client_at, running, settings_in, use_fake_solver
from support.service.rest import PROBLEM
from support.service.serve_process import serve_process

from optpipe_server.http import app
from optpipe_server.http import server as http_server
from optpipe_server.http.server import Server

HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": b"",
    "a line": b"GET /healthz HT",
    "headers": HEAD,
    "a body": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\r\n",
    "what is refused at once": b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
}
Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """One server for all tests of this file: no test may spoil the next."""
    with running(settings_in(tmp_path_factory.mktemp("service"))) as serving:
        yield serving


@pytest.fixture
def connect(server: tuple[str, Server]) -> Iterator[Connect]:
    url = httpx.URL(server[0])
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((url.host, url.port or 0), timeout=60))


def ended(client: socket.socket) -> bytes:
    """All that the service sends until it closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while chunk := client.recv(65536):
            received += chunk
    return received


@pytest.mark.parametrize("half", HALVES)
def test_an_incomplete_request_times_out(connect: Connect, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)
    monkeypatch.setattr(app, "ARRIVES_S", 0.3)
    client = connect()
    client.sendall(HALVES[half])
    expected = {"a body": b"HTTP/1.1 408", "chunks": b"HTTP/1.1 408", "what is refused at once": b"HTTP/1.1 404"}
    reply = ended(client)
    assert reply.startswith(expected[half]) if half in expected else reply == b""


def drip(client: socket.socket, texts: list[bytes]) -> None:
    for text in texts:
        client.sendall(text)
        time.sleep(0.02)


@pytest.mark.parametrize("after", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_slow_request_times_out(connect: Connect, after: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes keep arriving, but no complete request."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    client = connect()
    client.sendall(after)
    received = b""
    while after and not received.endswith(b"}"):  # the reply is one JSON object
        received += client.recv(65536)
    assert received.startswith(b"HTTP/1.1 200" if after else b"")
    with pytest.raises(ConnectionError):
        drip(client, [bytes([byte]) for byte in HEAD * 10])


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 10_000,
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Content-Length: 0x2\r\n\r\n{}",
        HEAD + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n{}\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 70_000,
    ],
)
def test_bytes_that_are_not_http_are_refused(server: tuple[str, Server], connect: Connect, head: bytes) -> None:
    client = connect()
    with suppress(ConnectionError):  # it has been refused before its end
        client.sendall(head)
    reply = ended(client)
    assert reply == b"" or reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert len(reply) < 2000
    with client_at(server[0]) as other:
        assert other.get("/healthz").status_code == 200


@pytest.mark.parametrize("most", [pytest.param(50, id="few"), pytest.param(1000, id="many", marks=pytest.mark.soak)])
def test_unread_streams_do_not_block_others(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many streams as allowed, and incomplete requests besides."""
    use_fake_solver(monkeypatch)
    with (
        running(replace(settings_in(tmp_path), streams=most)) as (url, _),
        client_at(url) as client,
    ):
        job = client.post("/v1/jobs", json={"problem": PROBLEM, "method": "hang"}).json()["url"]
        ask = f"GET {job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with ExitStack() as stack:
            connect = partial(socket.create_connection, (client.base_url.host, client.base_url.port or 0), timeout=60)
            streams = [stack.enter_context(connect()) for _ in range(most)]
            for stream in streams:
                stream.sendall(ask)
            for stream in streams:
                assert stream.recv(12) == b"HTTP/1.1 200"
            refused = client.get(f"{job}/events")
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            halves = [stack.enter_context(connect()) for _ in range(200)]
            for half in halves:
                half.sendall(HEAD)
            assert client.get(job).json()["state"] == "running"
        # Until it has noticed that they are gone.
        until(lambda: client.get(job, params={"wait": 0.01}).status_code != 503)
        assert client.post(f"{job}/cancel").status_code == 202


FLOOD, FEW_FILES, LOCKED_OUT_S = 2800, 1024, 2.0


@pytest.mark.parametrize("half", ["headers", "a body"])
def test_thousands_of_half_requests_lock_nobody_out_and_fill_no_log(tmp_path: Path, half: str) -> None:
    """More than the service has files for, while others ask; without keys, so that it waits for bodies.

    How long those wait is counted in the service's own seconds, whatever else the machine does.
    """
    allow_files(2 * FLOOD)
    with serve_process(tmp_path, files=FEW_FILES) as (process, client), ExitStack() as stack:
        address = (client.base_url.host, client.base_url.port)
        service, slowest_s = psutil.Process(process.pid), 0.0
        for number in range(FLOOD):
            flood = stack.enter_context(socket.create_connection(address, timeout=60))
            with suppress(ConnectionError):  # it has been ended for another one
                flood.sendall(HALVES[half])
            if number % 200 == 199:
                began_s = sum(service.cpu_times()[:2])
                with client_at(str(client.base_url)) as other:  # a new connection
                    assert other.get("/v1/jobs").status_code == 200
                slowest_s = max(slowest_s, sum(service.cpu_times()[:2]) - began_s)
        assert slowest_s < LOCKED_OUT_S
    assert (tmp_path / "serve.log").stat().st_size < 500_000


@pytest.mark.parametrize(("soft", "hard", "most"), [(256, 4096, 1500), (256, 1024, 724), (256, 256, 1)])
def test_the_number_of_connections_follows_the_file_limit(
    soft: int, hard: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is raised if the system allows it; some files are left for the rest of the process."""
    asked = []
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert http_server.connections(1500) == most
    assert asked == ([(min(hard, 1800), hard)] if hard > soft else [])
