"""`optpipe bench milp`: every switch has its row, and its figures agree with each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.enumeration import problem_of, stage
from typer.testing import CliRunner

from optpipe import Problem
from optpipe_cli.app import app

COMMAND = "from optpipe_cli.main import main; main()"


def save(problem: Problem, path: Path) -> Path:
    path.write_text(problem.model_dump_json(exclude_none=True))
    return path


def refused(path: Path, *words: str) -> str:
    """The sentence with which the command ends."""
    return str(CliRunner().invoke(app, ["bench", "milp", str(path), *words]).exception)


def test_every_switch_has_its_row(tmp_path: Path) -> None:
    """In a process of its own: highspy cannot be loaded beside ortools, which other tests use. Times are far too short
    for a proof."""
    stages = [stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(3)]
    path = save(problem_of(stages, [15] * 3, 5), tmp_path / "problem.json")
    command = [sys.executable, "-c", COMMAND, "bench", "milp", str(path), "--json", "--time-limit", "0.1"]
    rows = {
        row["switches"]: row for row in json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    }
    assert {row["size"] for row in rows.values()} == {"2x4"}  # there are 5 micro-batches only
    assert len(rows) == 14
    assert {row["solver"] for row in rows.values()} == {"HiGHS"}
    for row in rows.values():
        assert row["bound"] <= 123.0 <= (row["ms"] or 123.0) + 1e-4  # the optimum
        assert row["gap"] is None or 0 <= row["gap"] <= 1  # 1: no bound within so short a time
    none, full = rows["none"], rows["all"]
    for name in ("order of entry", "fixed order", "one variable a pair", "no determined ones", "all"):
        assert rows[name]["variables"] < none["variables"]
    assert rows["triangles"]["rows"] > none["rows"]
    assert full["non-zeros"] < none["non-zeros"]


def test_nothing_can_be_cut_from_a_problem_with_routes(tmp_path: Path) -> None:
    path = save(problem_of([stage(0, (1, 1, 1), 1)], [9], 4, routes=[[0]]), tmp_path / "problem.json")
    assert "a problem without either was expected" in refused(path)


def test_a_problem_must_be_large_enough(tmp_path: Path) -> None:
    path = save(problem_of([stage(0, (1, 1, 1), 1)], [9], 4), tmp_path / "problem.json")
    assert "2 × 4 at least were expected" in refused(path)


def test_an_unknown_solver_is_refused(tmp_path: Path) -> None:
    path = save(problem_of([stage(0, (1, 1, 1), 1)], [9], 4), tmp_path / "problem.json")
    assert "--solver = 'foo': auto, highs, gurobi, pulp or one of PuLP's solvers" in refused(path, "--solver", "foo")
