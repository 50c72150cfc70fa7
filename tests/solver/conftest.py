"""Where work is counted, the clock of a busy machine ends nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optpipe_solver import budget  # loads OR-Tools, before a test of the MILP loads HiGHS: the other way round it fails


@pytest.fixture(scope="session", autouse=True)
def _work_is_counted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "BACKSTOP", 1000.0)
        yield
