"""Which component may import which: DESIGN section 2, kept by import-linter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_follow_the_arrows():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_core_needs_no_torch_and_no_solver():
    code = (
        "import optpipe, sys; [getattr(optpipe, name) for name in optpipe.__all__]; "
        "print([m for m in ('torch', 'ortools', 'highspy', 'numba', 'fastapi', 'sqlalchemy', 'httpx') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
