"""Pages name what is there, and what stands in several files agrees: versions, Pythons, the workflows' commands."""

import fnmatch
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from packaging.version import Version
from support.slow import KEPT, PATTERNS

import optpipe
import optpipe_runtime
from optpipe import Device, Problem, Schedule, Stage, check
from optpipe.evaluate.effects import TABLE
from optpipe.model.ops import ActivationSizes
from optpipe.model.records import Level, Message
from optpipe_cli.app import TASKS
from optpipe_cli.app import optpipe as command_line

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
FOLDERS = "docs|examples|scripts|tests|benchmarks|solver|runtime|server|cache|cli"


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Return the page without its blocks of code, in which brackets mean other things."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names)
        names.add(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_are_there(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", target) and (not file.exists() or (anchor and anchor not in anchors(file))):
            broken.append(target)
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+|optpipe/[\w/]+\.py)`", prose(page)):
        if not (ROOT / name).exists() and "kfkb" not in name:  # which CONTRIBUTING.md tells the reader to make
            broken.append(name)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            waiting += [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", prose(page))]
    assert set(DOCS.rglob("*.md")) <= seen


SECTIONS = dict(
    re.findall(r"^## [^`\n]*`([\w/]+)/`\n(.*?)(?=^## |\Z)", read("architecture.md"), re.DOTALL | re.MULTILINE)
)


def modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}


@pytest.mark.parametrize("folder", SECTIONS)
def test_the_architecture_names_the_modules_that_there_are(folder: str) -> None:
    rows = re.findall(r"^\| ((?:`\w+/?`(?:, )?)+) \| (.*) \|$", SECTIONS[folder], re.MULTILINE)
    named = [name for names, _ in rows for name in re.findall(r"`(\w+)/?`", names)]
    there = {name for name in modules(ROOT / folder) if not name.startswith("__")}
    if named:  # the command line has no table: its modules are named as its commands are
        assert sorted(named) == sorted(there)
    for names, text in rows:
        room = ROOT / folder / names.strip("`/")
        if room.is_dir():
            assert set(re.findall(r"`([a-z_]+)`", text)) <= modules(room) | modules(room.parent), names


def test_the_milp_page_has_every_equation_and_the_function_of_its_rows() -> None:
    equations = read("milp.md").partition("## The equations")[2].partition("## Errata")[0]
    printed = re.findall(r"\\qquad \((\d+)\)\n```", equations)
    named = re.findall(r"`(\w+)` \((\d[\d, ]*)", equations)
    with_function = re.findall(r"\d+", " ".join(numbers for _, numbers in named))
    assert {*map(int, printed)} == {*map(int, with_function)} == {*range(1, 20)}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("solver/optpipe_solver/milp/*.py"))
    assert [name for name, _ in named if not re.search(rf"^ *(def )?{name}[(:]", sources, re.MULTILINE)] == []


@pytest.mark.parametrize("package", [optpipe, optpipe_runtime], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name_once(package: ModuleType) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    assert sorted(re.findall(rf"^::: {package.__name__}\.(\w+)$", pages, re.MULTILINE)) == sorted(package.__all__)


def test_the_pictures_of_the_concepts_are_those_that_are_drawn_now() -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, picture in pictures.concepts():
        assert picture == read(f"pictures/concepts/{name}.svg"), "draw them: .venv/bin/python docs/pictures.py concepts"
        assert f"pictures/concepts/{name}.svg" in read("concepts.md")


def test_the_table_of_the_memory_rule_is_the_rule() -> None:
    """Each cell, computed of some sizes, is what `TABLE` takes and frees."""
    section = read("concepts.md").partition("### What an op takes and frees")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]]
    table = {name: cells for names, *cells in rows for name in names.strip().split(", ")}
    for numbers in ((9, 4, 3, 2, 6), (4, 9, 4, 1, 2)):
        sizes = ActivationSizes(*map(np.array, numbers))
        for kind, effect in TABLE.items():
            takes, frees, host = map(str.strip, table.get(kind.name, ["", "", ""]))
            how, _, of_host = host.partition(" ")
            cells = {"takes": takes, "frees": frees, f"{how}_on_host": of_host}
            for name in ("takes", "frees", "takes_on_host", "frees_on_host"):
                expected = eval(cells.get(name) or "0", {}, vars(sizes) | {"max": np.maximum})
                assert getattr(effect, name)(sizes) == expected, (kind.name, name)


def test_the_fields_of_a_problem_file_are_explained() -> None:
    section = read("reference/problems.md").partition("## Fields of a problem file")[2].partition("\n## ")[0]
    records = (Problem, Device, Message, Stage, Level)
    fields = {name for record in records for name in record.model_fields}
    assert fields <= set(re.findall(r"`(\w+)`", section))


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


COMMANDS, PAGE = command_line(), read("commands.md")


def test_every_command_stands_once_on_the_page_below_a_task_that_it_is_for() -> None:
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
    shown = {task: re.findall(r"^- `optpipe (\w+)", sections[task], re.MULTILINE) for task in TASKS}
    every = sorted(name for name in COMMANDS if not name.startswith("-"))
    assert sorted(name for names in shown.values() for name in names) == every
    for task, (_, names) in TASKS.items():
        assert set(shown[task]) <= set(names.split()) <= set(every), task


@pytest.mark.parametrize("text", re.findall(r"^(?:- `|`)?(optpipe [a-z].*)$", PAGE, re.MULTILINE))
def test_a_command_has_the_options_that_stand_beside_it(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = r"(?<=[ `(])--?[a-z][a-z-]*"
    words = text.replace("`", " ").split()[1:]
    COMMANDS(
        [words[0], *words[1:2] * (words[0] in ("cache", "jobs", "keys", "problem") and words[1].islower()), "--help"]
    )
    assert set(re.findall(options, text)) <= set(re.findall(options, capsys.readouterr().out))


def test_the_lines_of_python_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "time_limit_s=20" in lines
    problem = ROOT / "examples" / "problems" / "fastlink-8x16.json"
    lines = lines.replace("time_limit_s=20", "time_limit_s=100, gap=1.0")
    lines = lines.replace("examples/problems/fastlink-8x16.json", str(problem))
    monkeypatch.chdir(tmp_path)
    exec(compile(lines, "README.md", "exec"), {})
    assert check(Problem.load(problem), Schedule.load("schedule.json")) == []


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_lowest_constraints_are_the_lower_bounds_of_pyproject() -> None:
    command = [sys.executable, ROOT / "scripts" / "lowest.py"]
    told = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    lowest = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    assert lowest == told, "python scripts/lowest.py > constraints-lowest.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    for name, version in (line.split("==") for line in lowest.splitlines()):
        found = re.search(rf"^{re.escape(name)}==([\d.]+)", pinned, re.MULTILINE)
        assert Version(found[1].rstrip(".")) >= Version(version), name


def test_the_version_and_the_license_are_the_same_everywhere() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    released = re.findall(r"^## \[?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation["version"] == optpipe.__version__ == released[0]
    assert PROJECT["dynamic"] == ["version"]
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    steps = [step.get("run", "") for job in read_yaml(workflow)["jobs"].values() for step in job["steps"]]
    for target in re.findall(r"^make (\S+)", "\n".join(steps), re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_every_python_that_is_named_is_tested() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    jobs = read_yaml(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    assert jobs["pinned"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("pattern", [*PATTERNS, *KEPT])
def test_a_pattern_of_slow_tests_names_some(pattern: str) -> None:
    path, _, name = pattern.partition("::")
    place = ROOT / "tests" / path.rstrip("*")
    assert place.exists()
    assert not name or fnmatch.filter(re.findall(r"def (test_\w+)", place.read_text(encoding="utf-8")), name)
