"""Two builds of OptPipe side by side, each a folder of its own with its environment: what their searches reach."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt

from benchmarks.random_problems import random_problem
from benchmarks.tables import text
from optpipe.errors import InputError
from optpipe.model.problem import Problem

COMPILED = "compiled first"  # of a search that had to wait for a compiler


class Reached(NamedTuple):
    """What one search of a build reached, ms; None: no schedule, no bound."""

    ms: float | None
    bound_ms: float | None
    method: str
    waited: bool


def builds(
    before: Path,
    after: Path,
    problems: list[Path] | None = None,
    /,
    *,
    random: Annotated[int, Parameter(help="Random problems as well, this many: all kinds in turns.")] = 0,
    time_limit: PositiveFloat = 10,
    time_limit_after: PositiveFloat | None = None,
    threads: PositiveInt = 1,
    placements: str = "keep",
) -> None:
    """Search each problem by `before` and by `after` in turn: folders of OptPipe in which `make setup` was run.

    With one thread, time is counted in work, so what both reach is the same again on a machine of the same kind.

    Parameters
    ----------
    problems
        Problem files; default: examples/problems.
    time_limit_after
        Another time limit for `after`, in s.
    """
    limits = {before: time_limit, after: time_limit_after or time_limit}
    for folder in limits:
        if not _program(folder).exists():
            raise InputError(f"{_program(folder)} is missing: run `make setup` in {folder}")
    paths = problems if problems or random else sorted(Path("examples/problems").glob("*.json"))
    options = ("--threads", str(threads), "--placements", placements)
    with TemporaryDirectory(prefix="optpipe-") as temporary:
        paths = [*(paths or ()), *(_saved(random_problem(i), Path(temporary)) for i in range(random))]
        for folder in limits:  # what is compiled once on a machine
            for _ in range(5):
                if not _search(folder, paths[0], (*options, "--time-limit", "60")).waited:
                    break
        print(f"{'problem':24}{'before':>11}{'bound':>11}{'after':>11}{'bound':>11}{'length':>9}{'bounds':>9}  methods")
        rows = []
        for path in paths:
            row = [_search(folder, path, (*options, "--time-limit", f"{s:g}")) for folder, s in limits.items()]
            rows.append(row)
            print(_line(path.stem, *row), flush=True)
    print(_summary(rows))


def _program(folder: Path) -> Path:
    return folder.absolute() / ".venv" / "bin" / "optpipe"


def _saved(problem: Problem, folder: Path) -> Path:
    path = folder / f"{problem.name}.json"
    problem.save(path)
    return path


def _search(folder: Path, problem: Path, options: Sequence[str]) -> Reached:
    command: list[str | Path] = [_program(folder), "solve", problem.absolute(), *options, "--no-cache", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise InputError(f"{folder}: {problem}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    waited = any(COMPILED in note for note in answer.get("notes", []))
    return Reached(
        answer.get("makespan_ms"), answer.get("lower_bound_ms"), answer.get("method") or answer["status"], waited
    )


def _line(name: str, before: Reached, after: Reached) -> str:
    values = (before.ms, before.bound_ms, after.ms, after.bound_ms)
    ratios = (_ratio(before.ms, after.ms), _ratio(before.bound_ms, after.bound_ms))
    methods = before.method if before.method == after.method else f"{before.method}, {after.method}"
    figures = "".join(f"{text(value, '.7g'):>11}" for value in values) + "".join(f"{text(r, '.4f'):>9}" for r in ratios)
    return f"{name[:23]:24}{figures}  {methods}"


def _ratio(before: float | None, after: float | None) -> float | None:
    return after / before if before and after else None


def _summary(rows: Sequence[Sequence[Reached]]) -> str:
    lines = []
    for name, values in (
        ("length", [_ratio(before.ms, after.ms) for before, after in rows]),
        ("bound", [_ratio(before.bound_ms, after.bound_ms) for before, after in rows]),
    ):
        ratios = [round(ratio, 9) for ratio in values if ratio]
        if ratios:
            smaller, larger = sum(ratio < 1 for ratio in ratios), sum(ratio > 1 for ratio in ratios)
            lines.append(
                f"{name}, after / before: mean {mean(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}; "
                f"{smaller} smaller, {ratios.count(1)} equal, {larger} larger of {len(ratios)}"
            )
    return "\n".join(lines)
