"""Where work is counted, the clock of a busy machine ends nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _work_is_counted() -> Iterator[None]:
    counting = sys.modules.get("optpipe_solver.budget")  # not imported here: it loads OR-Tools
    with pytest.MonkeyPatch.context() as patch:
        if counting:
            patch.setattr(counting, "BACKSTOP", 1000.0)
        yield
