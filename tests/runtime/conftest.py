"""Ranks for the tests: processes that run functions of `rank_cases` and `rank_systems`; two that live for the whole
session, and four."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the ranks inherit it

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
