"""Compiled functions: what is kept on disk is never older than what it was made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLER = """
from optpipe.evaluate.jit import compiled
import called

inner = compiled(called.inner)

@compiled
def outer(x):
    return inner(x) + 1

print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def run(folder: Path) -> list[int]:
    """What `outer(1)` is in a new process, and how often it was found on disk."""
    done = subprocess.run(
        [sys.executable, folder / "caller.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


def test_what_is_compiled_is_kept_until_a_function_that_it_calls_changes(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text("def inner(x):\n    return x * 2\n")
    assert run(tmp_path) == [3, 0]
    assert run(tmp_path) == [3, 1]
    (tmp_path / "called.py").write_text("def inner(x):\n    return x * 5\n")
    assert run(tmp_path) == [6, 0]
