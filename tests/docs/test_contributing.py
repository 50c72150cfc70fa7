"""The example in CONTRIBUTING.md: its files, put where it says, work as it says and have the form that is checked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from optpipe import InputError, Problem, problem_from
from optpipe.measured.convert import recording_from
from optpipe.measured.readers import READERS, RunFacts
from optpipe.process.protocol import Frame, Incumbent, Ready, Request

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"Save this as\s+`([\w/]+\.py)`:\n\n```python\n(.*?)```", CONTRIBUTING, re.DOTALL))


def test_the_schedule_that_it_adds_passes_its_test(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "solver", tmp_path / "solver", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
        run(ROOT, "ruff", "check", "--stdin-filename", name, "-", text=content)
        run(ROOT, "ruff", "format", "--check", "--stdin-filename", name, "-", text=content)
    registry = tmp_path / "solver/optpipe_solver/systems/__init__.py"
    text = registry.read_text(encoding="utf-8")
    for before in ("from optpipe_solver.systems import ", "FAMILIES = ("):
        assert text.count(before) == 1
        text = text.replace(before, before + "kfkb, ")
    registry.write_text(text, encoding="utf-8")
    (_, test) = FILES
    run(tmp_path, "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", test)
    command = re.search(r"^\.venv/bin/optpipe (solve .* --method kfkb:group=2 .*)$", CONTRIBUTING, re.MULTILINE)
    assert command
    run(tmp_path, "optpipe_cli", *command[1].replace("examples/", f"{ROOT}/examples/").split())
    assert (tmp_path / "s.json").exists()


def test_the_engine_that_it_shows_finds_schedules() -> None:
    (code,) = re.findall(r"^   ```python\n(.*?)^   ```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(dedent(code), "CONTRIBUTING.md", "exec"), scope)
    problem = Problem.load(ROOT / "examples" / "problems" / "ample-8x24.json")
    frames: list[Frame] = []
    scope["run"](Request(problem=problem, time_limit_s=10), frames.append)
    assert [type(frame) for frame in frames] == [Ready, Incumbent, Incumbent]


def test_the_reader_that_it_shows_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(
        r"^```python\n(from collections.abc import Sequence\n.*?)^```$", CONTRIBUTING, re.DOTALL | re.M
    )
    run(ROOT, "ruff", "check", "--stdin-filename", "optpipe/measured/readers/mine.py", "-", text=code)
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), scope)
    reader = scope["Mine"]()
    monkeypatch.setitem(READERS, reader.name, reader)
    file = tmp_path / "t.mine"
    file.write_text("0F0 0 1\n1F0 1 3\n1BW0 3 6\n0BW0 6 7\n")
    form, recording = recording_from([file], None, RunFacts())
    assert (form, len(recording.ops)) == ("mine", 4)
    measured = problem_from("mine", file)
    assert (measured.measured_ms, measured.replayed_ms) == (7.0, 7.0)
    file.write_text("0F0 0 1\n0F1 1\n")
    with pytest.raises(InputError, match=r"t\.mine, line 2: an op, its start and its end in ms are expected"):
        problem_from("mine", file)


def run(folder: Path, module: str, *arguments: str, text: str | None = None) -> None:
    """Run a module of Python's in this folder, whose solver comes before the installed one."""
    components = [ROOT / name for name in ("runtime", "server", "cache", "cli")]
    path = os.pathsep.join(map(str, (folder / "solver", ROOT, ROOT / "tests", *components)))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
