"""No files import each other in a circle, a package's `__init__` and its own modules included: `lint-imports` compares
only what stands side by side."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

COMPONENTS = ("cache", "cli", "runtime", "server", "solver")


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions and under TYPE_CHECKING make a circle, too."""
    graph = grimp.build_graph("benchmarks", "optpipe", *(f"optpipe_{name}" for name in COMPONENTS), cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    both = {"optpipe_runtime.measure.measured", "optpipe_runtime.factory"}
    assert both <= imports["optpipe_cli.profile"], "for type checkers, and in a function"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of a circle
