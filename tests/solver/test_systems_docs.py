"""The docs tell of every published schedule, with a picture of the problem of its paper's figure."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from optpipe import check
from optpipe_solver import systems
from optpipe_solver.portfolio.compare_methods import EVERY

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


def test_every_method_has_its_picture():
    assert set(pictures.FIGURES) == set(EVERY)


@pytest.mark.parametrize("method", EVERY)
def test_each_is_drawn_and_told_of(method):
    problem, _ = pictures.FIGURES[method]
    if method in systems.SYSTEMS:
        assert check(problem, systems.generate(method, problem)) == []
    assert (DOCS / "pictures" / "systems" / f"{method}.svg").exists()
    pages = {
        page.name
        for page in (DOCS / "systems").glob("*.md")
        if f"pictures/systems/{method}.svg" in page.read_text(encoding="utf-8")
    }
    assert len(pages) == 1


def test_the_index_names_every_page_and_every_method():
    index = (DOCS / "systems" / "README.md").read_text(encoding="utf-8")
    assert {page.name for page in (DOCS / "systems").glob("*.md")} - {"README.md"} == set(
        re.findall(r"\]\((\w[\w-]*\.md)\)", index)
    )
    assert [method for method in EVERY if f"`{method}`" not in index] == []
