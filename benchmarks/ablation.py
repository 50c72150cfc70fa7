"""What `auto` misses when one of its parts is left out: an engine of the search, or a heuristic of its first phase.

    python -m benchmarks.ablation run examples/problems/*.json --seconds 10
    python -m benchmarks.ablation run --random 100 --seconds 10 --without lns milp
    python -m benchmarks.ablation run examples/problems/*.json --heuristics
    python -m benchmarks.ablation table

`run` adds a JSON line for each problem and part to `results/ablation.jsonl` and skips what is there. Searches have one
thread, so their work is counted and a busy machine changes no result; a clock that runs slower in all their processes
keeps time limits away meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

SLOWER = 30  # how much slower the clock of the searches runs
_monotonic = time.monotonic
time.monotonic = lambda: _monotonic() / SLOWER  # before any module of the solver takes it

from benchmarks.random_problems import random_problem  # noqa: E402
from optpipe.evaluate.objective import raises, reaches, shorter  # noqa: E402
from optpipe.model.problem import Problem  # noqa: E402
from optpipe.process.protocol import Bound, Frame, Incumbent, Infeasible, Request  # noqa: E402
from optpipe_solver import tuning  # noqa: E402
from optpipe_solver.portfolio import Portfolio, engine_runs, heuristic_runs  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ablation.jsonl"
ENGINES = tuple(dict.fromkeys(run.engine for run in tuning.AUTO))
HEURISTICS = (tuning.HEURISTIC, "published")
KEYS = ("problem", "sha256", "seconds", "heuristics", "without")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of JSON lines")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="search with each part left out")
    run.add_argument("problems", nargs="*", type=Path, help="problem files")
    run.add_argument("--random", type=int, default=0, help="that many random problems, all kinds by turns")
    run.add_argument("--numbers", nargs="*", type=int, default=[], help="random problems by their numbers")
    run.add_argument("--seconds", type=float, default=10.0, help="time limit of a search, by its count of work")
    run.add_argument("--without", nargs="*", default=None, help="parts to leave out (default: each of them)")
    run.add_argument("--heuristics", action="store_true", help="only the heuristics' phase, without engines")
    commands.add_parser("table", help="print what is measured")
    given = parser.parse_args()
    if given.command == "table":
        print("\n".join(table(read(given.results))))
        return
    problems = [Problem.load(path) for path in given.problems]
    problems += [random_problem(number) for number in (*range(given.random), *given.numbers)]
    parts = (HEURISTICS if given.heuristics else ENGINES) if given.without is None else tuple(given.without)
    measure(problems, parts, given.seconds, given.heuristics, given.results)


# Measuring


def measure(problems: list[Problem], parts: tuple[str, ...], seconds: float, heuristics: bool, results: Path) -> None:
    """Search each problem with everything, then without each part; add what is not in the file."""
    rows = {key(row): row for row in read(results)}
    for problem in problems:
        full: dict[str, Any] = {}
        for without in ("", *parts):
            asked = {
                "problem": problem.name,
                "sha256": problem.sha256,
                "seconds": seconds,
                "heuristics": heuristics,
                "without": without,
            }
            row = rows.get(key(asked))
            if row is None:
                if without and not heuristics and without not in full["ran"]:  # so leaving it out changes nothing
                    outcome = full | asked | {"wall_s": 0.0}
                else:
                    outcome = asked | search(problem, without, seconds, heuristics)
                row = rows[key(asked)] = outcome
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            full = full or row
            told = f"{row['problem']:22} without {without or 'nothing':10}"
            print(f"{told} {row['best_ms']} over {row['bound_ms']}", flush=True)


def search(problem: Problem, without: str, seconds: float, heuristics: bool) -> dict[str, Any]:
    """One search without a part: its first and best schedule, its bound, and which engines ran."""
    row: dict[str, Any] = {"first_ms": None, "best_ms": None, "bound_ms": None, "infeasible": None}
    steps: list[tuple[str, float]] = []

    def take(frame: Frame) -> None:
        if isinstance(frame, Incumbent):
            steps.append((frame.method, portfolio.incumbents.best_ms))
        elif isinstance(frame, Bound):
            row["bound_ms"] = frame.lower_bound_ms
        elif isinstance(frame, Infeasible):
            row["infeasible"] = frame.reason

    began, ran = _monotonic(), set[str]()
    request = Request(problem=problem, time_limit_s=seconds, threads=1)
    with without_part(without), recorded_engines(ran):
        portfolio = Portfolio(request, take)
        if heuristics:
            run_heuristics(portfolio)
        else:
            portfolio.run()
    if steps:
        row |= {"first_ms": steps[0][1], "best_ms": steps[-1][1]}
    return row | {"steps": steps, "ran": sorted(ran), "wall_s": round(_monotonic() - began, 1)}


def run_heuristics(portfolio: Portfolio) -> None:
    """Only what heuristics do before engines start."""
    if portfolio.begin():
        share = tuning.heuristics_share(portfolio.request.problem, portfolio.clock.seconds)
        runs = portfolio.heuristics.run(share)
        while next(runs, True) is None and not portfolio.incumbents.proven:
            pass


@contextmanager
def without_part(name: str) -> Iterator[None]:
    """Leave an engine, a heuristic or the published schedules out of `auto`."""
    engines = tuple(run for run in tuning.AUTO if run.engine != name)
    heuristic = "naive" if name == tuning.HEURISTIC else tuning.HEURISTIC
    with patch.object(tuning, "AUTO", engines), patch.object(tuning, "HEURISTIC", heuristic):
        if name == "published":
            with patch.object(heuristic_runs, "variants", lambda problem: iter(())):
                yield
        else:
            yield


@contextmanager
def recorded_engines(ran: set[str]) -> Iterator[None]:
    """Note the engines that are started."""
    start: Callable[..., None] = engine_runs.EngineRuns.start

    def noted(runs: Any, run: tuning.EngineRun, *rest: Any) -> None:
        ran.add(run.engine)
        start(runs, run, *rest)

    with patch.object(engine_runs.EngineRuns, "start", noted):
        yield


# The table


def table(rows: list[dict[str, Any]]) -> list[str]:
    """For each group of problems and each part: how often schedules and bounds are worse without it, and better."""
    lines = [
        "| left out | problems | schedules longer | shorter | longer by, mean | at most | first schedule longer | "
        "bounds lower | by at most | proven |",
        "| --- " + "| ---: " * 9 + "|",
    ]
    full = {key(row)[:-1]: row for row in rows if not row["without"]}
    groups = dict.fromkeys((group(row), row["heuristics"], row["seconds"]) for row in rows if row["without"])
    for of, heuristics, seconds in groups:
        phase = "heuristics' phase" if heuristics else "search"
        lines.append(f"| **{of}, {phase} of {seconds:g} s** {'| ' * 9}|")
        here = [row for row in rows if (group(row), row["heuristics"], row["seconds"]) == (of, heuristics, seconds)]
        for without in dict.fromkeys(row["without"] for row in here if row["without"]):
            pairs = [(row, full[key(row)[:-1]]) for row in here if row["without"] == without]
            if feasible := [pair for pair in pairs if pair[1]["best_ms"]]:
                lines.append(compared(without, feasible))
    return lines


def compared(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """A line of the table: searches without a part, each beside the one with everything."""
    lengths = [(row["best_ms"] or float("inf"), full["best_ms"]) for row, full in pairs]
    firsts = [(row["first_ms"] or float("inf"), full["first_ms"]) for row, full in pairs]
    bounds = [(row["bound_ms"], full["bound_ms"]) for row, full in pairs]
    longer_by = [length / full - 1 for length, full in lengths]
    columns = (
        len(pairs),
        sum(shorter(full, length) for length, full in lengths),
        sum(shorter(length, full) for length, full in lengths),
        f"{mean(longer_by):.2%}",
        f"{max(longer_by):.2%}",
        sum(shorter(full, first) for first, full in firsts),
        sum(raises(full, bound) for bound, full in bounds),
        f"{max(1 - bound / full for bound, full in bounds):.2%}",
        f"{proven(row for row, _ in pairs)} of {proven(full for _, full in pairs)}",
    )
    return f"| {name} | {' | '.join(map(str, columns))} |"


def proven(rows: Iterable[dict[str, Any]]) -> int:
    """How many schedules are as short as their bound."""
    return sum(row["best_ms"] is not None and reaches(row["best_ms"], row["bound_ms"]) for row in rows)


def group(row: dict[str, Any]) -> str:
    """Which problems it belongs to: random ones have their number at the end."""
    name = row["problem"]
    if name.startswith("zb-"):
        return "zero-bubble's"
    return "random" if name.count("-") == 2 and name.rpartition("-")[2].isdigit() else "examples"


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


if __name__ == "__main__":
    if len(sys.argv) == 1:  # as `engine_runs` starts it: an engine whose clock runs slower, too
        from optpipe_solver.engines import main as engine

        engine()
    else:
        engine_runs.ENGINE = "benchmarks.ablation"
        main()
