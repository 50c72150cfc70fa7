"""The same examples on every machine, and no deadline: machines are noisy. Which tests are slow. Databases and ranks
for whoever asks."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from support.examples import USUAL
from support.processes import GRACE_S
from support.service.postgres import database, database_url, postgres, postgres_url, sqlite_url
from support.slow import is_slow

from optpipe import anytime, solvers

if TYPE_CHECKING:
    from support.ranks.worker import Ranks

__all__ = ["database", "database_url", "postgres", "postgres_url", "sqlite_url"]  # fixtures

settings.register_profile("optpipe", deadline=None, derandomize=True, max_examples=USUAL // 4)
settings.register_profile("soak", settings.get_profile("optpipe"), max_examples=5 * USUAL)
settings.load_profile("optpipe")


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """A solver that a busy machine starts late ends by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anytime, "GRACE_S", GRACE_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """What compiles in the background on a user's machine is compiled before the first test."""
    from optpipe_solver import engines  # it loads numba

    if any(map(engines.waits_for_compiler, engines.LOOPS)):
        subprocess.run([sys.executable, "-m", solvers.installed().COMPILE], check=True)


@pytest.fixture
def scripted_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches ask a scripted solver."""
    monkeypatch.setattr(solvers.installed(), "SEARCH", "support.fakes.scripted_solver")
    monkeypatch.setattr(solvers.installed(), "SYSTEMS", "support.fakes.first")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two for the whole session: processes that run functions of `support.ranks`."""
    from support.ranks.worker import pool  # it loads torch

    yield from pool(2, tmp_path_factory)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end: nobody need search it for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
