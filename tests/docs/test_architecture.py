"""docs/architecture.md: its tables name the modules that there are, and leave none out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## [^`\n]*`([\w/]+)/`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = {"optpipe_solver": {"first", "compare"}}  # only started, by `python -m`; the text says so


def modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}


def table(section: str) -> list[tuple[list[str], str]]:
    """Return the rows whose first column names modules: these, and the second column."""
    rows = re.findall(r"^\| ((?:`\w+/?`(?:, )?)+) \| (.*) \|$", section, re.MULTILINE)
    return [(re.findall(r"`(\w+)/?`", names), text) for names, text in rows]


@pytest.mark.parametrize("folder", SECTIONS)
def test_the_rooms_and_modules_of_a_component_are_named(folder: str) -> None:
    named = {name for names, _ in table(SECTIONS[folder]) for name in names}
    there = {name for name in modules(ROOT / folder) if not name.startswith("__")} - COMMANDS.get(
        Path(folder).name, set()
    )
    if named:  # the command line has no table: its modules are named as its commands are
        assert named == there


@pytest.mark.parametrize("folder", SECTIONS)
def test_modules_that_are_named_within_a_room_are_there(folder: str) -> None:
    for names, text in table(SECTIONS[folder]):
        room = ROOT / folder / names[0]
        if room.is_dir() and len(names) == 1:
            assert set(re.findall(r"`([a-z_]+)`", text)) <= modules(room) | modules(room.parent), names[0]


def test_all_components_have_a_section() -> None:
    assert {Path(folder).name for folder in SECTIONS} >= {
        path.parent.name for path in ROOT.glob("*/optpipe_*/__init__.py")
    }
    assert "optpipe" in SECTIONS
