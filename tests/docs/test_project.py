"""What stands in several files agrees: the version, the lowest versions, the Pythons, the workflows' commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import optpipe

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SPEC = importlib.util.spec_from_file_location("lowest", ROOT / "scripts" / "lowest.py")
assert SPEC
assert SPEC.loader
lowest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lowest)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def commands(workflow: Path) -> list[str]:
    return [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_lowest_constraints_are_the_lower_bounds_of_pyproject() -> None:
    constraints = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    assert constraints.splitlines() == lowest.lowest(PYPROJECT), "python scripts/lowest.py > constraints-lowest.txt"


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="'rich' has no lower bound"):
        lowest.lowest('[project]\nname = "x"\ndependencies = ["rich"]\noptional-dependencies = {}')


def test_what_is_pinned_is_no_older_than_the_lowest() -> None:
    pinned = dict(
        line.lower().replace("_", "-").split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
    for line in lowest.lowest(PYPROJECT):
        name, _, version = line.partition("==")
        assert parts(pinned[name].partition("+")[0]) >= parts(version), name


def parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_version_is_written_once_in_code_and_cited() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert read(ROOT / "CITATION.cff")["version"] == optpipe.__version__
    released = re.findall(r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[:1] in ([], [optpipe.__version__])


def test_the_license_is_the_one_that_is_named() -> None:
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == read(ROOT / "CITATION.cff")["license"] == "Apache-2.0"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert commands(workflow)
    for command in commands(workflow):
        make, target, *variables = command.split()
        assert make == "make"
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
        for name, _, value in (variable.partition("=") for variable in variables):
            assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), command
            assert not value or (ROOT / value).is_file()


def test_every_python_that_is_named_is_tested_by_the_readmes_command() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    jobs = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    assert jobs["pinned"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert set(commands(ROOT / ".github" / "workflows" / "test.yml")) == {
        "make test",
        "make check-web",
        "make suite CONSTRAINTS=constraints-lowest.txt",
        "make suite CONSTRAINTS=",
    }
    assert "make test " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_hooks_call_what_the_check_calls() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            command = hook["entry"].replace(".venv/bin/", "$(BIN)/").removesuffix(" --force-exclude")
            assert command == "make check" or command in makefile


def test_make_lists_its_targets() -> None:
    listed = subprocess.run(["make", "-s", "-C", ROOT, "help"], text=True, capture_output=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony
    assert [line.split()[0] for line in listed.splitlines()] == phony[1].split()
