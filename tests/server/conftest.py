"""Clients of real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.service import running, settings_in, use_fake_solver

from optpipe_server import Settings

Serving = Callable[[Settings], httpx.Client]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


@pytest.fixture
def fake_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Starts servers; each call returns a client of a new one."""
    with ExitStack() as stack:

        def start(settings: Settings) -> httpx.Client:
            url, _ = stack.enter_context(running(settings))
            return stack.enter_context(httpx.Client(base_url=url, timeout=20, trust_env=False))

        yield start


@pytest.fixture
def client(serving: Serving, settings: Settings, fake_solver: None) -> httpx.Client:
    return serving(settings)
