"""What stands in several files agrees: the version, the lowest versions, the Pythons, the workflows' commands, names of
slow tests."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.slow import KEPT, PATTERNS

import optpipe

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_the_lowest_constraints_are_the_lower_bounds_of_pyproject() -> None:
    command = [sys.executable, ROOT / "scripts" / "lowest.py"]
    told = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    lowest = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    assert lowest == told, "python scripts/lowest.py > constraints-lowest.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    for name, version in (line.split("==") for line in lowest.splitlines()):
        found = re.search(rf"^{re.escape(name)}==([\d.]+)", pinned, re.MULTILINE)
        assert found
        assert parts(found[1]) >= parts(version), name


def parts(version: str) -> list[int]:
    return [int(part) for part in version.rstrip(".").split(".")]


def test_the_version_and_the_license_are_the_same_everywhere() -> None:
    citation = read(ROOT / "CITATION.cff")
    released = re.findall(r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation["version"] == optpipe.__version__ == released[0]
    assert PROJECT["dynamic"] == ["version"]
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    steps = [step.get("run", "") for job in read(workflow)["jobs"].values() for step in job["steps"]]
    for target in re.findall(r"^make (\S+)", "\n".join(steps), re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_every_python_that_is_named_is_tested() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    jobs = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    assert jobs["pinned"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("pattern", [*PATTERNS, *KEPT])
def test_a_pattern_of_slow_tests_names_some(pattern: str) -> None:
    path, _, name = pattern.partition("::")
    place = ROOT / "tests" / path.rstrip("*")
    assert place.exists()
    assert not name or fnmatch.filter(re.findall(r"def (test_\w+)", place.read_text(encoding="utf-8")), name)
