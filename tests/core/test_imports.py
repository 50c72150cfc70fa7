"""Imports: none in a circle, nothing heavy in the core. Those between components are `lint-imports`' part."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter

import grimp

COMPONENTS = ("cache", "cli", "runtime", "server", "solver")
HEAVY = ("torch", "ortools", "highspy", "numba", "fastapi", "sqlalchemy", "httpx")


def test_no_files_import_each_other_in_a_circle():
    """A package's `__init__` and its own modules too, in functions and under TYPE_CHECKING."""
    graph = grimp.build_graph("benchmarks", "optpipe", *(f"optpipe_{name}" for name in COMPONENTS), cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    both = {"optpipe_runtime.measure.measured", "optpipe_runtime.profiles"}
    assert both <= imports["optpipe_cli.profile"], "for type checkers, and in a function"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of a circle


def test_the_core_needs_no_torch_and_no_solver():
    code = (
        "import optpipe, sys; [getattr(optpipe, name) for name in optpipe.__all__]; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
