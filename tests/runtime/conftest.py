"""Ranks for the tests: processes that run functions of `support.ranks`. Two live for the whole session
(`support.ranks.pools`), more for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import worker
from support.ranks.pools import pool, ranks

__all__ = ["ranks"]  # a fixture


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from pool(3, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from pool(4, tmp_path_factory)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    yield from pool(8, tmp_path_factory)
