"""Two builds of OptPipe side by side, each a folder of its own with its environment: what their searches reach, and how
far that is from the best published schedule."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt

from benchmarks.problems import with_budget
from benchmarks.random_problems import random_problem
from benchmarks.tables import text
from optpipe.errors import InputError
from optpipe.evaluate.objective import length_ms
from optpipe.model.problem import Problem
from optpipe_solver.clock import Clock
from optpipe_solver.systems import fitting, on_other_stages, variants

PUBLISHED_S = 60.0  # that the published schedules of one problem may take


class Reached(NamedTuple):
    """What one search of a build reached, ms; None: no schedule, no bound."""

    ms: float | None
    bound_ms: float | None
    method: str
    processor_s: float  # of all its processes


def builds(
    before: Path,
    after: Path,
    problems: list[Path] | None = None,
    /,
    *,
    random: Annotated[int, Parameter(help="Random problems as well, this many: all kinds in turns.")] = 0,
    memory: tuple[PositiveFloat, ...] = (),
    time_limit: PositiveFloat = 60,
    time_limit_after: PositiveFloat | None = None,
    threads: PositiveInt = 1,
    placements: str = "keep",
) -> None:
    """Search each problem by `before` and by `after` in turn: folders of OptPipe in which `make setup` was run.

    With one thread, time is counted in work, so what both reach is the same again on a machine of the same kind. The
    last ratio is to the shortest published schedule, such as zero-bubble's or Primus', on the stages as given or with
    `--placements all` on any.

    Parameters
    ----------
    problems
        Problem files; default: all of examples/problems, zero-bubble's among them.
    memory
        Each problem with so much of the memory that 1F1B needs on the first device instead of its own; repeat for
        several.
    time_limit_after
        Another time limit for `after`, in s.
    """
    limits = {before: time_limit, after: time_limit_after or time_limit}
    for folder in limits:
        if not _program(folder).exists():
            raise InputError(f"{_program(folder)} is missing: run `make setup` in {folder}")
        subprocess.run([_program(folder).with_name("python"), "-m", "optpipe_solver.compiling"], cwd=folder, check=True)
    paths = problems if problems or random else sorted(Path("examples/problems").rglob("*.json"))
    options = ("--threads", str(threads), "--placements", placements)
    rows, published = list[tuple[Reached, Reached]](), list[float | None]()
    print(f"{'problem':24}{'before':>11}{'bound':>11}{'CPU s':>7}{'after':>11}{'bound':>11}{'CPU s':>7}", end="")
    print(f"{'length':>9}{'bounds':>9}{'publ.':>9}  methods")
    with TemporaryDirectory(prefix="optpipe-") as temporary:
        for problem in (*map(Problem.load, paths or ()), *map(random_problem, range(random))):
            for path in _saved(problem, memory, Path(temporary)):
                reached = (_search(folder, path, (*options, "--time-limit", f"{s:g}")) for folder, s in limits.items())
                first, second = reached
                rows.append((first, second))
                published.append(_ratio(_published_ms(Problem.load(path), placements), second.ms))
                print(_line(path.stem, first, second, published[-1]), flush=True)
    print(_summary(rows, published))


def _program(folder: Path) -> Path:
    return folder.absolute() / ".venv" / "bin" / "optpipe"


def _saved(problem: Problem, memory: Sequence[float], folder: Path) -> Iterator[Path]:
    """Write the problem, or one with each share of the memory that 1F1B needs on the first device."""
    on_first = problem.costs.activation[[s for s, stage in enumerate(problem.stages) if stage.device == 0]]
    full = min(len(problem.devices), problem.microbatches) * int(on_first.max(axis=-1).sum())
    for share in memory or (None,):
        named = problem if share is None else with_budget(problem, round(share * full))
        path = folder / f"{problem.name}{'' if share is None else f'-{share:g}'}.json"
        named.save(path)
        yield path


def _published_ms(problem: Problem, placements: str) -> float | None:
    """The length of the shortest published schedule that fits; None if none does."""
    clock = Clock(PUBLISHED_S)
    schedules = [*fitting(variants(problem), problem, "keep", clock)]
    if placements == "all":
        schedules += fitting((name for name, _ in on_other_stages(problem)), problem, "all", clock)
    return min((length_ms(each, "makespan") for each in schedules), default=None)


def _search(folder: Path, problem: Path, options: Sequence[str]) -> Reached:
    command: list[str | Path] = [_program(folder), "solve", problem.absolute(), *options, "--no-cache", "--json"]
    before_s = _processor_s()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise InputError(f"{folder}: {problem}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    method = answer.get("method") or answer["status"]
    return Reached(answer.get("makespan_ms"), answer.get("lower_bound_ms"), method, _processor_s() - before_s)


def _processor_s() -> float:
    """Of all processes that have ended and that this one, or one that it began, has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(name: str, before: Reached, after: Reached, to_published: float | None) -> str:
    ratios = (_ratio(before.ms, after.ms), _ratio(before.bound_ms, after.bound_ms), to_published)
    methods = before.method if before.method == after.method else f"{before.method}, {after.method}"
    figures = "".join(
        f"{text(each.ms, '.7g'):>11}{text(each.bound_ms, '.7g'):>11}{each.processor_s:7.1f}" for each in (before, after)
    )
    figures += "".join(f"{text(ratio, '.4f'):>9}" for ratio in ratios)
    return f"{name[:23]:24}{figures}  {methods}"


def _ratio(before: float | None, after: float | None) -> float | None:
    return after / before if before and after else None


def _summary(rows: Sequence[Sequence[Reached]], to_published: Sequence[float | None]) -> str:
    lines = []
    for name, values in (
        ("length, after / before", [_ratio(before.ms, after.ms) for before, after in rows]),
        ("bound, after / before", [_ratio(before.bound_ms, after.bound_ms) for before, after in rows]),
        ("length, after / best published schedule", to_published),
    ):
        ratios = [round(ratio, 9) for ratio in values if ratio]
        if ratios:
            smaller, larger = sum(ratio < 1 for ratio in ratios), sum(ratio > 1 for ratio in ratios)
            lines.append(
                f"{name}: mean {mean(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}; "
                f"{smaller} smaller, {ratios.count(1)} equal, {larger} larger of {len(ratios)}"
            )
    return "\n".join(lines)
