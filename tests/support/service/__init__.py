"""A real server on a loopback port, in a thread of the test."""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from optpipe import solvers
from optpipe_server import Settings
from optpipe_server.http.server import Server, listen, make_server


def client_at(url: str, key: str | None = None, **headers: str) -> httpx.Client:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    # `verify`: without TLS nobody need read the authorities' certificates, which takes longer than most tests.
    return httpx.Client(base_url=url, headers=headers, timeout=240, trust_env=False, verify=False)


@contextmanager
def running(settings: Settings, port: int = 0) -> Iterator[tuple[str, Server]]:
    """Yield the URL of a server that answers, and the server; it has ended after the block."""
    ready = threading.Event()
    urls: list[str] = []

    def tell(url: str) -> None:
        urls.append(url)
        ready.set()

    with listen("127.0.0.1", port) as listener, unclosed_collected():
        server = make_server(listener, settings, tell)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(60)
            yield urls[0], server
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def client_of(settings: Settings) -> Iterator[tuple[httpx.Client, Server]]:
    with running(settings) as (url, server), client_at(url) as client:
        yield client, server


@contextmanager
def fake_service(folder: Path, database: str | None = None, **changed: Any) -> Iterator[tuple[str, Server]]:
    """Yield URL and server of a service with fake solvers, for a file of tests; `changed` are its settings."""
    with pytest.MonkeyPatch.context() as patched:
        use_fake_solver(patched)
        with running(replace(settings_in(folder, database), **changed)) as serving:
            yield serving


@contextmanager
def unclosed_collected() -> Iterator[None]:
    """Collect connections that uvicorn leaves unclosed, in this test instead of a later one.

    Their clients hung up while its loop ended.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def settings_in(folder: Path, database: str | None = None) -> Settings:
    url = database or f"sqlite:///{folder / 'jobs.sqlite'}"
    return Settings(url, cache=folder / "cache.sqlite", pack=None, ping_s=0.2, first_schedule_s=120.0)


def use_fake_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `support.fakes.solver` and `support.fakes.first`, whose behaviour the job's method names."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(solvers.installed(), "SEARCH", "support.fakes.solver")
    for module in ("FIRST", "SYSTEMS"):
        monkeypatch.setattr(solvers.installed(), module, "support.fakes.first")


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream without comments."""
    event: dict[str, Any] = {}
    for line in response.iter_lines():
        if not line and event:
            yield event
            event = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
