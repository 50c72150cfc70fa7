"""Two ranks for the tests: processes that live for the whole session and run functions of `rank_cases`."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the spawned ranks inherit it

import rank_worker


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rank_worker.Ranks]:
    pool = rank_worker.Ranks(multiprocessing.get_context("spawn"), 2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
