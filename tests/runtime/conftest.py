"""Ranks for the tests: processes that run functions of `support.ranks` or of a test. Two live for the whole session
(`tests/conftest.py`), more for a file. And a host link of this process."""

import logging
from collections.abc import Iterator

import pytest
import torch
from support.ranks import worker
from support.service.following import set_waits

from optpipe_runtime.memory.link import Link


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from worker.pool(3, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from worker.pool(4, tmp_path_factory)


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> worker.Ranks:
    """Those that a parameter names."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _quick_clients(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a key, and all that they say is heard."""
    set_waits(monkeypatch)
    monkeypatch.delenv("OPTPIPE_KEY", raising=False)
    caplog.set_level(logging.INFO, "optpipe.client")


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link(torch.device("cpu"), False)
    yield link
    link.close()
