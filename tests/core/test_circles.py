"""No files import each other in a circle, a package's `__init__` and its own modules included: `lint-imports` compares
only what stands side by side."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT / name
    for name in (
        "optpipe",
        "solver/optpipe_solver",
        "runtime/optpipe_runtime",
        "server/optpipe_server",
        "cache/optpipe_cache",
        "cli/optpipe_cli",
        "benchmarks",
    )
]


def test_no_files_import_each_other_in_a_circle():
    files = {module_name(package, file): file for package in PACKAGES for file in package.rglob("*.py")}
    circle = circle_of({name: imports_of(name, file, files) for name, file in files.items()})
    shown = "\n  imports ".join(str(files[name].relative_to(ROOT)) for name in circle)
    assert not circle, f"a circle of imports:\n  {shown}"


def test_hidden_imports_count(tmp_path):
    """Imports in functions and under TYPE_CHECKING make a circle, too."""
    lines = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.b import B",
        "b": "def b():\n    import pack.c",
        "c": "from pack import a",
        "d": "from pack.a import A",
    }
    files = {f"pack.{name}": tmp_path / f"{name}.py" for name in lines}
    for name, text in lines.items():
        files[f"pack.{name}"].write_text(text)
    circle = circle_of({name: imports_of(name, file, files) for name, file in files.items()})
    assert circle[0] == circle[-1]
    at = circle.index("pack.a")
    assert (circle[at:-1] + circle[:at]) == ["pack.a", "pack.b", "pack.c"]


def module_name(package: Path, file: Path) -> str:
    """The name under which a file is imported; that of the package for its `__init__.py`."""
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(name: str, file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules that a file imports anywhere in it, functions and TYPE_CHECKING included."""
    imports: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: line {node.lineno}: imports are absolute in this project"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imports.update(name if name in modules else node.module for name in names)
    return imports & modules.keys() - {name}


def circle_of(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle, each module importing the next and the last being the first again; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []
