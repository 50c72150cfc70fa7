"""Every link between the docs leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Return the page without its blocks of code, in which brackets mean other things."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.add(f"{name}-{count}" if count else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    """A path in backquotes that begins with a folder of the repository is a file or a folder there."""
    named = re.findall(
        r"`((?:docs|examples|scripts|tests|solver|runtime|server|cache|cli)/[\w./-]+|optpipe/[\w/]+\.py)`", prose(page)
    )
    missing = [name for name in named if not (ROOT / name).exists() and not is_example(page, name)]
    assert missing == []


def is_example(page: Path, name: str) -> bool:
    """Whether CONTRIBUTING.md tells the reader to make this file."""
    return page.name == "CONTRIBUTING.md" and "kfkb" in name


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        todo += [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", prose(page))]
    assert [page for page in (ROOT / "docs").rglob("*.md") if page not in seen] == []
