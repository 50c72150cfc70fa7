"""Ranks for the tests: processes that run functions of `support.ranks`. Two live for the whole session, more for a
file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import worker


def _ranks(count: int, folders: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    pool = worker.Ranks(worker.STARTER, count, folders.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from _ranks(3, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from _ranks(4, tmp_path_factory)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from _ranks(8, tmp_path_factory)
