"""Every block of code in the docs is run: here page by page, or by the test that this file names; or the page says why
not, in a comment before the block. So are the cells of examples/tour.ipynb, and the examples of CONTRIBUTING.md: its
files, put where it says, work as it says and have the form that is checked."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from optpipe import InputError, Problem, export_schedule, problem_from
from optpipe.measured.convert import recording_from
from optpipe.measured.readers import READERS, RunFacts
from optpipe.process.protocol import Frame, Incumbent, Ready, Request
from optpipe.show.page import Picture
from optpipe_cli.app import optpipe
from optpipe_solver.systems import generate

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<before>[^\n]*)\n+( *)```(?P<language>[^\n]*)\n(?P<text>.*?)^\2```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
CODE = {"python", "sh", "console"}
NO_CODE = {"diff", "math", "sh-compose", "text", "yaml"}
# Pages whose blocks belong together in a way of their own, and the test that runs them.
ELSEWHERE = {
    ("CONTRIBUTING.md", "python"): "tests/docs/test_blocks.py",
    ("README.md", "python"): "tests/docs/test_pages.py",
    ("docs/profile.md", "python"): "tests/runtime/test_follow.py",
    ("docs/service.md", "sh"): "tests/deploy/test_service_page.py",
    ("docs/training.md", "python"): "tests/runtime/test_training.py",
}


class Block(NamedTuple):
    page: str
    before: str  # the line above it
    language: str
    text: str

    @property
    def is_left_out(self) -> bool:
        return NOT_RUN.fullmatch(self.before) is not None

    @property
    def runs_here(self) -> bool:
        return self.language in CODE and not self.is_left_out and (self.page, self.language) not in ELSEWHERE


BLOCKS = [
    Block(str(page.relative_to(ROOT)), found["before"], found["language"], found["text"])
    for page in PAGES
    for found in FENCE.finditer(page.read_text(encoding="utf-8"))
]


def test_every_block_says_its_language() -> None:
    assert [(block.page, block.language) for block in BLOCKS if block.language not in CODE | NO_CODE] == []
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a block that this test cannot read"


def test_pages_are_run_by_the_tests_that_are_named() -> None:
    for (page, language), test in ELSEWHERE.items():
        assert any((block.page, block.language) == (page, language) for block in BLOCKS)
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_blocks_that_are_not_run_are_few() -> None:
    """They need a GPU, another machine, many packages, or minutes. One more: say in its page why, and count it here."""
    assert len([block for block in BLOCKS if block.is_left_out]) == 25


@pytest.mark.parametrize("page", list(dict.fromkeys(block.page for block in BLOCKS if block.runs_here)))
def test_the_blocks_of_a_page_run(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """One after the other, in one folder. What a page says that they print, they print."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "cache.sqlite"))
    monkeypatch.setenv("COLUMNS", "120")
    scope: dict[str, Any] = {"__name__": "__main__"}
    if page == "docs/stacks.md":
        write_what_the_reader_has(tmp_path)
    printed = ""
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "text" and block.before.endswith("prints:"):
            assert printed == block.text
        if not block.runs_here:
            continue
        if block.language == "python":
            run_python(block, scope)
        else:
            run_commands(block, capsys, request)
        printed = capsys.readouterr().out


def run_python(block: Block, scope: dict[str, Any]) -> None:
    """Runs it, or saves it under the name that the page gives it. Searches end with their first schedule; one beside a
    training runs before it, as many steps would pass meanwhile on a busy machine."""
    text = re.sub(r"time_limit_s=\d+", "time_limit_s=100, gap=1.0", block.text)
    text = text.replace("searching.start()", "searching.run()").replace("searching.join()", "pass")
    if name := re.search(r"Save this as `(\w+\.py)`", block.before):
        Path(name[1]).write_text(text, encoding="utf-8")
    else:
        exec(compile(text, block.page, "exec"), scope)


def run_commands(block: Block, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    """Runs its lines; in a block `console` those behind a $, whose output stands below them."""
    if block.language == "sh":
        for line in block.text.replace("\\\n", " ").splitlines():
            run_command(line, request)
        return
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        capsys.readouterr()
        run_command(command, request)
        said = capsys.readouterr()
        assert output in ("", said.out + said.err), command


def run_command(line: str, request: pytest.FixtureRequest) -> None:
    """Runs a command of OptPipe in this process, and a script for torchrun on two ranks that run already. Of `make`
    there need only be the target."""
    # Any schedule will do, so a search ends with its first one.
    program, *words = shlex.split(re.sub(r"--time-limit \d+", "--time-limit 100 --gap 1", line), comments=True)
    if program == "optpipe":
        optpipe()(words)
    elif program == "torchrun":
        from support.ranks import scripts  # it loads torch

        option, count, script = words
        ranks = request.getfixturevalue("ranks")
        assert (option, int(count)) == ("--nproc-per-node", ranks.world)
        text = Path(script).read_text(encoding="utf-8")
        print(*ranks(scripts.run, text=text, folder=str(Path.cwd())), sep="")
    else:
        assert program == "make", line
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), line


def write_what_the_reader_has(folder: Path) -> None:
    """A problem and a schedule of PyTorch's, as in "A schedule that you have"."""
    problem = Problem.load(ROOT / "examples" / "problems" / "ample-8x24.json")
    problem.save(folder / "p.json")
    (folder / "theirs.csv").write_text(export_schedule(generate("1f1b", problem), "torch-csv"), encoding="utf-8")


def test_the_cells_of_the_notebook_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples")
    cells = json.loads(Path("tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    scope: dict[str, Any] = {}
    shown = [last_value(text.replace("time_limit_s=10", "time_limit_s=100, gap=1.0"), scope) for text in code]
    assert [complaint.partition(" during")[0] for complaint in shown[1]] == ["device 0 needs 20 GB"]
    pictures = [value for value in shown if isinstance(value, Picture)]
    assert len(pictures) == 2
    assert all("<" in picture._repr_html_() for picture in pictures)
    peaks = re.findall(r"peaks (\[.*\])", capsys.readouterr().out)
    assert len(peaks) == 2
    assert peaks[0] == peaks[1], "the certificate does not depend on times"


def last_value(text: str, scope: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last line, as a notebook shows it, None if that is no expression."""
    tree = ast.parse(text)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "tour.ipynb", "exec"), scope)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "tour.ipynb", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), scope)


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
