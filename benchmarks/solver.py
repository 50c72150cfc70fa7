"""What `solve` reaches, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cyclopts.types import NonNegativeInt

from benchmarks.random_problems import random_problem
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import text
from optpipe.anytime import solve
from optpipe.errors import InputError
from optpipe.evaluate.objective import shorter
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe_cli.app import option_name
from optpipe_cli.options import Options, read
from optpipe_solver.systems import is_system

MOMENTS = (1.0, 10.0)  # s
EACH = ("method", "time_limit_s", "threads", "seed")  # in which searches may differ


def solver(
    problems: list[Path] | None = None,
    /,
    *,
    options: Options[KeepOptions] = KeepOptions(),
    against: list[str] | None = None,
    random: NonNegativeInt = 0,
    results: ResultsPath = None,
) -> None:
    """Measure what `solve` finds and when, start of processes included.

    Parameters
    ----------
    problems
        Problem files.
    against
        A further search with another method, time limit, number of threads or seed, such as method=lns or threads=4,
        compared with the first; repeatable.
    random
        Random problems as well, this many: all kinds in turns.
    """
    searches = [options, *(_changed(options, change) for change in against or ())]
    for asked in searches:
        is_system(asked.method)  # an unknown method is refused before the first search
    loaded = [*map(Problem.load, problems or ()), *map(random_problem, range(random))]
    if not loaded:
        raise InputError("problems: none are given; problem files or --random 22 were expected")
    same = options.model_copy(update=dict.fromkeys(EACH))
    kept = Results(results, "solver", ("problem", "sha256", *(f"asked_{name}" for name in EACH)), same)
    rows: list[dict[str, Any]] = []
    for asked in searches:
        values = {f"asked_{name}": getattr(asked, name) for name in EACH}
        moments = [moment for moment in MOMENTS if moment < asked.time_limit_s]
        by = f"by {_search_name(values, searches)}".rstrip()
        times = "".join(f"{f'{moment:g} s':>10}" for moment in (*moments, asked.time_limit_s))
        print(f"{'problem':18}{'first: s':>9}{'ms':>10}{times}{'bound':>10}{'gap':>7}  {by}")
        for problem in loaded:
            row = kept.find(problem.name, problem.sha256, *values.values())
            if row is None:
                result = solve(problem, **asked.arguments())
                row = kept.add({"sha256": problem.sha256} | values | _row(problem, result, moments))
            rows.append(row | {"search": _search_name(values, searches)})
            print(_line(row))
        if random:
            print(gaps_by_kind(rows[-random:]))
    if len(searches) > 1:
        print(comparison(rows))


def _changed(options: SolveOptions, change: str) -> SolveOptions:
    """The options with one of them changed, such as `threads=4`."""
    name, _, value = change.partition("=")
    if name not in EACH:
        raise InputError(f"--against = {change!r}: {', '.join(EACH)} with = and a value were expected")
    return read(SolveOptions, options.model_dump(exclude_none=True) | {name: value})


def _row(problem: Problem, result: Result, moments: Sequence[float]) -> dict[str, Any]:
    steps = [(step.time_s, step.value_ms, step.method) for step in result.history]
    after = {
        f"ms_after_{moment:g}_s": min((ms for at, ms, _ in steps if at <= moment), default=None) for moment in moments
    }
    return {
        "problem": problem.name,
        "first_s": steps[0][0] if steps else None,
        "first_ms": steps[0][1] if steps else None,
        **after,
        "best_ms": result.value_ms,
        "bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "status": result.status,
        "method": result.method,
        "reason": result.reason,
        "notes": result.notes,
        "time_s": result.time_s,
        "steps": steps,
    }


def _line(row: dict[str, Any]) -> str:
    figures = [value for name, value in row.items() if name.endswith("_ms") or name.startswith("ms_after")]
    shown = "".join(f"{text(value, '.6g'):>10}" for value in figures)
    end = f"{text(row['gap'], '.1%'):>7}  {row['method'] or row['reason']}"
    return f"{row['problem'][:17]:18}{text(row['first_s'], '.2f'):>9}{shown}{end}"


def _search_name(asked: dict[str, Any], options: list[SolveOptions]) -> str:
    """A search by that in which it differs from others."""
    several = [name for name in EACH if len({getattr(option, name) for option in options}) > 1]
    shown = {name: asked[f"asked_{name}"] for name in several}
    return ", ".join(
        str(value) if name == "method" else f"{option_name(name)} {value:g}" for name, value in shown.items()
    )


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    """By search: the gaps, how long schedules are beside those of the first search, how many are shorter and by how
    much at most. Only of problems for which every search has a schedule."""
    searches: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        searches.setdefault(row["search"], {})[row["sha256"]] = row
    first = next(iter(searches.values()))
    solved_by_all = [problem for problem in first if all(of[problem]["gap"] is not None for of in searches.values())]
    lines = [f"{'search':24}{'problems':>9}{'proven':>8}{'mean gap':>10}{'length':>9}{'shorter':>9}{'at most by':>12}"]
    for search, row_of in searches.items() if solved_by_all else ():
        gaps = [row_of[problem]["gap"] for problem in solved_by_all]
        lengths = [(row_of[problem]["best_ms"], first[problem]["best_ms"]) for problem in solved_by_all]
        ratios = [ms / first_ms for ms, first_ms in lengths]
        count_shorter = sum(shorter(ms, first_ms) for ms, first_ms in lengths)
        lines.append(
            f"{search:24}{len(gaps):>9}{gaps.count(0):>8}{mean(gaps):>10.1%}{mean(ratios):>9.2%}"
            f"{count_shorter:>9}{max(0.0, 1 - min(ratios)):>12.2%}"
        )
    return "\n".join(lines)


def gaps_by_kind(rows: Sequence[dict[str, Any]]) -> str:
    """The gaps of random problems, by kind and of all."""
    gaps = [(row["problem"].partition("-")[0], row["gap"]) for row in rows if row["gap"] is not None]
    kinds = {kind: [gap for other, gap in gaps if other == kind] for kind, _ in gaps}
    lines = [f"{'kind':18}{'problems':>9}{'proven':>8}{'mean gap':>10}{'largest':>9}"]
    for kind, its_gaps in (kinds | {"all": [gap for _, gap in gaps]}).items():
        if its_gaps:
            count, proven = len(its_gaps), its_gaps.count(0)
            lines.append(f"{kind:18}{count:>9}{proven:>8}{sum(its_gaps) / count:>10.1%}{max(its_gaps):>9.1%}")
    return "\n".join(lines)
