"""What the backends take of HiGHS, Gurobi and PuLP, tried with the solvers themselves."""

import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from optpipe.model.arrays import Floats
from optpipe_solver.clock import Clock
from optpipe_solver.milp.backends import PIP_SIZE, Task, UnavailableError, find_backend, is_licensed
from optpipe_solver.milp.rows import Rows


def task(rows: Rows, clock: Clock, solutions: list[Floats], threads: int = 1) -> Task:
    """Minimize the first variable."""
    return Task(rows, 0, {}, clock, threads, 0, solutions.append, lambda bound: None)


def knapsacks() -> Rows:
    """300 items, 100 limits: no solver proves the least value that stays behind in 3 s."""
    draw, rows = random.Random(0), Rows()
    behind, packed = rows.new_variable(0.0, 1e5), [rows.new_literal() for _ in range(300)]
    worth = [float(draw.randint(50, 100)) for _ in packed]
    rows.add([(1.0, behind)], zip(worth, packed, strict=True), sum(worth))
    for _ in range(100):
        rows.add((), [(-float(draw.randint(1, 60)), x) for x in packed], -3000.0)
    return rows


@pytest.fixture
def gurobis_runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The parameters of each run of Gurobi."""
    gurobipy, runs = pytest.importorskip("gurobipy"), list[dict[str, float]]()

    class Model(gurobipy.Model):  # type: ignore[misc, name-defined]
        def optimize(self, callback: object = None) -> None:
            runs.append({name: getattr(self.Params, name) for name in ("Threads", "Seed", "MIPGap", "TimeLimit")})
            super().optimize(callback)

    monkeypatch.setattr(gurobipy, "Model", Model)
    return runs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PuLP's own
def test_what_pulps_gurobi_has_when_time_is_up_is_a_solution(gurobis_runs: list[dict[str, float]]) -> None:
    """PuLP's status is then that there is none."""
    pytest.importorskip("pulp")
    rows, solutions = knapsacks(), list[Floats]()
    assert find_backend("pulp:GUROBI")(task(rows, Clock(1.0), solutions)).status == "time is up"
    (x,) = solutions
    assert all(np.dot(value, x[index]) >= at_least - 1e-5 for index, value, at_least in rows.each())
    (run,) = gurobis_runs
    assert (run["Threads"], run["Seed"], run["MIPGap"]) == (1, 0, 0.0)
    assert 0 < run["TimeLimit"] < 0.9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("solver", ["pulp:GUROBI", "pulp:CBC"])
def test_no_time_left_is_not_taken_for_no_limit(solver: str, gurobis_runs: list[dict[str, float]]) -> None:
    pytest.importorskip("pulp")
    rows, solutions = Rows(), list[Floats]()
    rows.new_variable(0.0, 1.0)
    assert find_backend(solver)(task(rows, Clock(0.0), solutions)).status == "time is up"
    assert solutions == gurobis_runs == []


def test_gurobis_time_begins_with_its_run(gurobis_runs: list[dict[str, float]]) -> None:
    """Reading the rows takes 10 of 30 s here."""
    clock = Passing()

    class Slow(Rows):
        def each(self) -> Iterator[tuple[list[int], list[float], float]]:
            clock.used_s += 10.0
            return super().each()

    rows = Slow()
    rows.new_variable(0.0, 1.0)
    assert find_backend("gurobi")(task(rows, clock, [])).status == "optimal"
    assert [run["TimeLimit"] for run in gurobis_runs] == [20.0]


class Passing(Clock):
    """Its time passes as a test says."""

    used_s = 0.0

    @property
    def wall_left_s(self) -> float:
        return 30.0 - self.used_s


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("solver", ["gurobi", "pulp:GUROBI"])
@pytest.mark.parametrize("what", ["variables", "rows"])
def test_pips_licence_of_gurobi_counts_variables_and_rows_as_the_program_does(solver: str, what: str) -> None:
    """It counts indicator constraints as rows, too, which the program has none of."""
    pytest.importorskip("gurobipy")
    if is_licensed("gurobi"):
        pytest.skip("there is a licence")
    for size in (PIP_SIZE, PIP_SIZE + 1):
        rows, count = Rows(), size if what == "variables" else 1
        for _ in range(count):
            rows.new_variable(0.0, 10.0)
        for _ in range(size if what == "rows" else 1):
            rows.add([(1.0, var) for var in range(count)], (), 1.0)
        assert size in (len(rows.lower), len(rows.at_least))
        if size > PIP_SIZE:
            with pytest.raises(UnavailableError, match=r"size-limited license|has no licence for this model of"):
                find_backend(solver)(task(rows, Clock(60.0), []))
        else:
            assert find_backend(solver)(task(rows, Clock(60.0), [])).status == "optimal"


HIGHS = """
import highspy
from optpipe_solver.clock import Clock
from optpipe_solver.milp.backends import Task, find_backend
from optpipe_solver.milp.rows import Rows

class Passing(Clock):
    used_s = 0.0
    wall_left_s = property(lambda self: 30.0 - self.used_s)

class Highs(highspy.Highs):
    def run(self):
        print("run", *(self.getOptionValue(name)[1] for name in ("threads", "time_limit")))
        clock.used_s += 10.0
        return super().run()

highspy.Highs = Highs
for threads in (1, 2, 1):
    clock, rows = Passing(), Rows()
    length, start = rows.new_variable(0.0, 9.0), rows.new_literal()
    rows.add([(1.0, length)], [(-1.0, start)], 2.0)
    print(find_backend("highs")(Task(rows, 0, {start.var: 1.0}, clock, threads, 0, lambda x: None, print)).status)
"""


def test_each_run_of_highs_has_the_time_that_is_left_and_its_own_number_of_threads() -> None:
    """A start is completed in a run of its own, which takes 10 of 30 s here. The first run of a process fixes the
    threads of the later ones, which then end at once without a solution."""
    ran = subprocess.run([sys.executable, "-c", HIGHS], capture_output=True, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("run", "optimal", "ended", "time"))]
    assert lines == [
        line for threads in (1, 2, 1) for line in (f"run {threads} 30.0", f"run {threads} 20.0", "optimal")
    ]
