"""The list of what `make test` leaves out names tests that there are."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
from support.slow import KEPT, PATTERNS

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("pattern", [*PATTERNS, *KEPT])
def test_a_pattern_names_tests(pattern: str) -> None:
    path, _, name = pattern.partition("::")
    place = TESTS / path.rstrip("*")
    assert place.exists()
    assert not name or fnmatch.filter(re.findall(r"def (test_\w+)", place.read_text(encoding="utf-8")), name)
