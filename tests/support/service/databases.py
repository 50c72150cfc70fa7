"""For tests that do not depend on the database; `tests/server/database` has what its statements do on each."""

from __future__ import annotations

import pytest

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
shared_on_sqlite = pytest.mark.parametrize("shared", ["sqlite"], indirect=True)  # the server of a file of tests
