"""What the site of the docs has to have: every public name in the reference, and pictures as they are drawn now.

`make docs` builds it, and refuses links and names that lead nowhere, and pages that the navigation leaves out.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import optpipe
import optpipe_runtime

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = [
    name
    for page in (DOCS / "reference").glob("*.md")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
assert SPEC
assert SPEC.loader
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


@pytest.mark.parametrize("package", [optpipe, optpipe_runtime], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name_once(package: ModuleType) -> None:
    name = package.__name__
    of_package = [entry.removeprefix(f"{name}.") for entry in REFERENCE if entry.rpartition(".")[0] == name]
    assert sorted(of_package) == sorted(package.__all__)


def test_the_pictures_of_the_concepts_are_those_that_are_drawn_now() -> None:
    for name, picture in pictures.concepts():
        drawn = (DOCS / "pictures" / "concepts" / f"{name}.svg").read_text(encoding="utf-8")
        assert picture == drawn, "draw them again: .venv/bin/python docs/pictures.py concepts"
        assert f"pictures/concepts/{name}.svg" in (DOCS / "concepts.md").read_text(encoding="utf-8")


def test_the_readme_fits_on_one_screen() -> None:
    """As many lines as a reader scrolls through in a moment; pages are one click away."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80
