"""Ranks that live as long as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import worker


def pool(count: int, folders: pytest.TempPathFactory) -> Iterator[worker.Ranks]:
    started = worker.Ranks(worker.STARTER, count, folders.mktemp("ranks"))
    yield started
    started.close()
