"""README.md and docs/commands.md: the commands, options and lines of Python that they show are there and work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optpipe import Problem, Schedule, check
from optpipe_cli.app import optpipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
COMMANDS = optpipe()


def test_the_page_has_every_command() -> None:
    shown = re.findall(r"^\| `optpipe (\w+)", PAGE, re.MULTILINE)
    assert sorted(shown) == sorted(name for name in COMMANDS if not name.startswith("-"))


@pytest.mark.parametrize("text", re.findall(r"^(?:\| `|`)?(optpipe [a-z].*)$", PAGE, re.MULTILINE))
def test_a_command_has_the_options_that_stand_beside_it(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = r"(?<=[ `(])--?[a-z][a-z-]*"
    words = text.replace("`", " ").split()[1:]
    COMMANDS([words[0], *words[1:2] * (words[0] in ("cache", "keys", "problem") and words[1].islower()), "--help"])
    assert set(re.findall(options, text)) <= set(re.findall(options, capsys.readouterr().out))


def test_the_lines_of_python_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "time_limit_s=20" in lines
    problem = ROOT / "examples" / "problems" / "fastlink-8x16.json"
    lines = lines.replace("time_limit_s=20", "time_limit_s=100, gap=1.0")
    lines = lines.replace("examples/problems/fastlink-8x16.json", str(problem))
    monkeypatch.chdir(tmp_path)
    exec(compile(lines, "README.md", "exec"), {})
    assert check(Problem.load(problem), Schedule.load("schedule.json")) == []
