"""What each step of the paper's MILP is worth: every switch has its row, and its figures agree with each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.oracles.enumeration import problem_of, stage

ROOT = Path(__file__).parents[2]
COLUMNS = ("solver", "variables", "rows", "nonzeros", "seconds", "ms", "bound", "gap")


def test_every_switch_has_its_row(tmp_path: Path) -> None:
    """In a process of its own: highspy cannot be loaded beside ortools, which other tests use. Times are far too short
    for a proof."""
    stages = [stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(3)]
    path = tmp_path / "problem.json"
    problem_of(stages, [15] * 3, 5).save(path)
    command = [sys.executable, "-m", "benchmarks", "milp", path, "--time-limit", "0.1"]
    _, *lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT).stdout.splitlines()
    assert {line[:6].strip() for line in lines} == {"2x4"}  # there are 5 micro-batches only
    rows = {line[6:28].strip(): dict(zip(COLUMNS, line[28:].split(), strict=True)) for line in lines}
    assert len(rows) == 14
    assert {row["solver"] for row in rows.values()} == {"HiGHS"}
    for row in rows.values():
        ms = 123.0 if row["ms"] == "–" else float(row["ms"])
        assert float(row["bound"]) <= 123.0 <= ms + 1e-4  # the optimum
    variables = {name: int(row["variables"]) for name, row in rows.items()}
    for name in ("order of entry", "fixed order", "one variable a pair", "no determined ones", "all"):
        assert variables[name] < variables["none"]
    assert int(rows["triangles"]["rows"]) > int(rows["none"]["rows"])
    assert int(rows["all"]["nonzeros"]) < int(rows["none"]["nonzeros"])


def test_a_problem_from_which_nothing_can_be_cut_is_refused(bench, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    for more, message in (
        ({"routes": [[0]]}, "a problem without either was expected"),
        ({}, "2 × 4 at least were expected"),
    ):
        problem_of([stage(0, (1, 1, 1), 1)], [9], 4, **more).save(path)
        assert message in bench("milp", path).err
    assert "solver = 'foo': auto, highs, gurobi, pulp or one of PuLP's" in bench("milp", path, "--solver", "foo").err
