"""The docs tell of every published schedule, with a picture of the problem of its paper's figure."""

import importlib.util
import re
from pathlib import Path

import pytest

from optpipe import check
from optpipe_solver import systems
from optpipe_solver.compare import EVERY

DOCS = Path(__file__).parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)


def test_every_method_has_its_picture():
    lacking, unknown = set(EVERY) - set(pictures.FIGURES), set(pictures.FIGURES) - set(EVERY)
    assert not lacking, f"add a line for each of {sorted(lacking)} to FIGURES in docs/pictures.py"
    assert not unknown, f"FIGURES in docs/pictures.py has {sorted(unknown)}: no method has this name"


@pytest.mark.parametrize("method", EVERY)
def test_each_is_drawn_and_told_of(method):
    assert method in pictures.FIGURES, f"add a line for {method} to FIGURES in docs/pictures.py"
    problem, _ = pictures.FIGURES[method]
    if method in systems.SYSTEMS:
        assert check(problem, systems.generate(method, problem)) == []
    drawn = (DOCS / "pictures" / "systems" / f"{method}.svg").exists()
    assert drawn, f"draw the picture: .venv/bin/python docs/pictures.py {method}"
    pages = {
        page.name
        for page in (DOCS / "systems").glob("*.md")
        if f"pictures/systems/{method}.svg" in page.read_text(encoding="utf-8")
    }
    assert len(pages) == 1, (
        f"show ../pictures/systems/{method}.svg in one page of docs/systems; it is in {sorted(pages) or 'none'}"
    )


def test_the_index_names_every_page_and_every_method():
    index = (DOCS / "systems" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (DOCS / "systems").glob("*.md")} - {"README.md"}
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    assert pages == linked, f"add {sorted(pages ^ linked)} to the first table of docs/systems/README.md, or remove it"
    lacking = [method for method in EVERY if f"`{method}`" not in index]
    assert not lacking, f"add {lacking} to the first table of docs/systems/README.md"
