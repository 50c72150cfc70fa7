"""What a search with the MILP reports, of itself and of a solver that fails or does not take the model."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.oracles.enumeration import SPAN, problem_of, stage
from support.oracles.milp import Solver
from support.until import until

from optpipe import anytime, improve, solvers
from optpipe.process import process_tree
from optpipe.process.child import Child
from optpipe.process.protocol import End, Frame, Note, Request
from optpipe_cli.main import main
from optpipe_solver.clock import Clock
from optpipe_solver.portfolio import PlacementSearch, engine_runs
from optpipe_solver.portfolio.engine_runs import EngineProcess, EngineRuns
from optpipe_solver.portfolio.portfolio import incumbents_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PuLP's own
def test_a_library_of_pulps_may_raise_anything_or_use_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS takes the place of what raises; what has used its time is not said to have ended."""
    pulp = pytest.importorskip("pulp")
    from optpipe_solver.milp.backends import Task, UnavailableError, find_backend
    from optpipe_solver.milp.rows import Rows

    def fail(*_: object) -> None:
        raise RuntimeError("no licence")

    def wait(self: pulp.LpSolver, problem: pulp.LpProblem) -> int:
        time.sleep(0.97 * self.timeLimit)  # as CBC does
        return int(problem.status)

    rows = Rows()
    rows.new_variable(0.0, 1.0)

    def task() -> Task:
        return Task(rows, 0, {}, Clock(1.0), 1, 0, lambda x: None, lambda bound: None)

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
    with pytest.raises(UnavailableError, match=r"^PuLP's PULP_CBC_CMD failed: no licence$"):
        find_backend("PULP_CBC_CMD")(task())
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", wait)
    assert find_backend("PULP_CBC_CMD")(task()).status == "time is up"


def test_a_search_says_how_far_it_is(solver: Solver) -> None:
    """So that its last report is known whenever it is stopped."""
    frames = solver.all_frames(SPAN, time_limit_s=10)
    reports = [frame for frame in frames if isinstance(frame, Note) and frame.method]
    assert reports[0].ongoing
    texts = [report.text for report in reports if report.ongoing]
    assert any(text.startswith("milp: HiGHS: not ended, ") and "bound" in text for text in texts)
    assert not reports[-1].ongoing


def test_where_the_milp_is_stopped_its_last_report_stands() -> None:
    so_far = Note(text="milp: 3 windows by HiGHS", method="milp", ongoing=True)
    ended = Note(text="milp: 4 windows by HiGHS", method="milp")
    *_, last = notes_after(so_far)
    assert re.fullmatch(r"milp: 3 windows by HiGHS; stopped after [\d.]+ s", last.text)
    assert (last.method, last.ongoing) == ("milp", False)
    assert notes_after(so_far, ended, End()) == [so_far, ended]


def notes_after(*messages: Frame) -> list[Note]:
    """The notes of a search that asked for the MILP, once its process has sent these messages and is gone."""
    frames: list[Frame] = []
    request = Request(problem=SPAN, method="milp", time_limit_s=60.0)
    runs = EngineRuns(request, [], incumbents_of(request, frames.append), Clock(60.0), frames.append)
    process = EngineProcess("milp", cast(Child, None), 1, None, 0.0, 1.0)
    for message in (*messages, None):
        runs.handle(process, message)
    return [frame for frame in frames if isinstance(frame, Note)]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers.installed(), "SEARCH", "support.fakes.scripted_solver")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.mark.usefixtures("scripted")
def test_who_cancels_a_search_learns_how_far_it_was() -> None:
    search = improve(SPAN, method="ongoing", time_limit_s=60.0)
    assert next(search).notes == ()
    search.cancel()
    *_, last = search
    (note,) = last.notes
    assert re.fullmatch(r"milp: 2 windows; stopped after [\d.]+ s", note)
    assert last.reports == last.notes


@pytest.mark.usefixtures("scripted")
def test_a_report_on_the_end_takes_the_place_of_those_before() -> None:
    *_, last = improve(SPAN, method="reports", time_limit_s=60.0)
    assert (last.notes, last.reports) == (("milp: 3 windows", "something else"), ("milp: 3 windows",))


@pytest.mark.usefixtures("scripted")
def test_of_a_solver_that_said_nothing_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anytime, "GRACE_S", 0.0)
    search = improve(SPAN, method="silent", time_limit_s=0.2)
    until(lambda: not process_tree.members(search.mark))  # its time passes though nobody asks for a result
    *_, last = search
    assert last.reason == last.notes[-1]
    assert re.match(r"the solver had reported nothing when it was stopped after [\d.]+ s", last.notes[-1])
    search = improve(SPAN, method="silent", time_limit_s=60.0)
    search.cancel()
    *_, last = search
    assert last.notes == ()


def test_with_all_placements_the_milp_runs_though_the_best_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_runs, "ENGINE", "support.fakes.engine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("milp", "reports")
    problem = problem_of([stage(d, (1, 1, 1), 1, 1) for d in range(2)], [9, 9], 2)
    frames: list[Frame] = []
    request = Request(problem=problem, method="milp", placements="all", time_limit_s=600.0)
    PlacementSearch(request, frames.append).run()
    begun, report = [frame for frame in frames if isinstance(frame, Note)]
    assert begun.ongoing
    assert begun.text.endswith(": milp: none of its searches had begun")
    assert re.fullmatch(r"(the stages as given|\d chunks?.*): milp: as asked", report.text)
    assert report.method == "milp"


def test_who_interrupts_the_start_of_a_command_gets_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_spec(name: str, *_: object) -> None:
        if name == "optpipe_cli.app":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "optpipe_cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
