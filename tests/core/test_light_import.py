"""`import optpipe` needs nothing heavy: the imports between components are `lint-imports`' part."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "ortools", "highspy", "numba", "fastapi", "sqlalchemy", "httpx")


def test_the_core_needs_no_torch_and_no_solver():
    code = (
        "import optpipe, sys; [getattr(optpipe, name) for name in optpipe.__all__]; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
