"""OptPipe's MILP against `check` (on random problems), to the byte, and its refusals; what it reports of itself and of
a solver that fails. `test_milp_switches` compares it with every program there is."""

import re
import sys
import time
from itertools import combinations, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import notes, schedules
from support.oracles.enumeration import EXHAUSTIVE, LATE_START, SPAN, best_of_all, problem_of, stage
from support.oracles.milp import Solver
from support.problems.small import lasting, problems_of_every_sort
from support.processes import until

from benchmarks.milp import cut
from optpipe import Problem, Schedule, anytime, check, improve
from optpipe.evaluate.objective import Objective
from optpipe.lift import lift
from optpipe.process import process_tree
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Note, Programs, Request
from optpipe_cli.main import main
from optpipe_solver import milp
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.milp.backends import TOLERANCE, Task, UnavailableError, find_backend
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.reading import Reading
from optpipe_solver.milp.rows import Literal, Rows
from optpipe_solver.milp.variables import MIB, WITHOUT_STEPS, Switches, Units, assignment
from optpipe_solver.milp.windows import WindowChoice
from optpipe_solver.portfolio import PlacementSearch, engine_runs
from optpipe_solver.portfolio.engine_runs import EngineProcess, EngineRuns
from optpipe_solver.portfolio.portfolio import incumbents_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


def test_what_the_model_lacks_is_said(solver: Solver) -> None:
    parts = stage(0, (2, 2, 1), 2, 1, (2, 2, 2), (1, 1), parts=2)
    assert notes(solver.frames(problem_of([parts], [3], 2)))[-1] == (
        "milp: its optimum is no bound, as the model has no recompute, no single parts of activations; method auto "
        "has no such limits"
    )


def test_each_search_says_how_it_ended(solver: Solver) -> None:
    assert re.fullmatch(
        r"milp: HiGHS: optimal after \d+\.\d s and \d+ nodes, its own best 25 ms, bound 25 ms; \d+ variables, "
        r"\d+ rows, with micro-batches in the order in which they enter",
        notes(solver.frames(EXHAUSTIVE["a slow offload of a part"]))[-1],
    )


def test_windows_are_solved_of_a_problem_with_more_ops_than_the_limit(solver: Solver) -> None:
    problem = EXHAUSTIVE["both offload"]  # 12 compute ops
    frames = solver.frames(problem, milp_ops=11)
    assert [check(problem, schedule) for schedule in schedules(frames, problem)][-1] == []
    windows, whole = notes(frames)
    assert re.fullmatch(r"milp: [1-9]\d* windows, \d+ of them shorter, its own best [\d.]+ ms; the last by .*", windows)
    assert whole == "milp: no search of the whole, as it has 12 compute ops, and milp_ops = 11"
    assert all("HiGHS: optimal" in text for text in notes(solver.frames(problem, milp_ops=12)))


def window_models(problem: Problem, schedule: Schedule) -> list[Model]:
    """The models of some windows of a schedule, small and large."""
    choice, models = WindowChoice(problem, seed=1), []
    for _ in range(12):
        window = choice.window(Reading(schedule, "none"))
        models.append(Model(problem, "makespan", schedule.makespan_ms, Switches(), window=window))
        choice.learn(len(models) % 3 > 0, 0.0)
    return models


@pytest.mark.parametrize(
    ("name", "has"),
    [("shared-pcie-4x8", "O"), ("packed-4x8", "O"), ("recompute-4x12", "C"), ("slowlink-8x16-parts4", ".1")],
)
def test_a_schedule_satisfies_every_row_of_its_windows(name: str, has: str) -> None:
    """A window leaves the schedule itself as a solution: what it fixes is what the schedule does, with what it
    recomputes and the parts that it moves."""
    problem = Problem.load(EXAMPLES / f"{name}.json")
    schedules_found = islice(STREAMS["adaoffload"](problem, "makespan"), 6)
    schedule = min(schedules_found, key=lambda each: each.makespan_ms)
    assert any(has in str(op) for program in schedule.programs for op in program)
    complete = 0
    for model in window_models(problem, schedule):
        x = np.array(model.rows.lower)
        start = assignment(model.variables, schedule)
        x[list(start)] = list(start.values())
        if set(start) == set(np.flatnonzero(model.rows.binary).tolist()):  # else the solver decides of some
            complete += 1
            x = model.rows.earliest(x)
            x[model.variables.length] = schedule.makespan_ms * model.scale
            assert all(np.dot(value, x[index]) >= at_least - 1e-9 for index, value, at_least in model.rows.each())
            assert (x <= np.array(model.rows.upper) * (1 + 1e-9)).all()
            assert check(problem, lift(problem, model.starts(x))) == []
    assert complete > 3


@pytest.mark.parametrize(("name", "has"), [("recompute-4x12", "C"), ("slowlink-8x16-parts4", "O")])
def test_windows_shorten_what_recomputes_or_moves_parts(solver: Solver, name: str, has: str) -> None:
    problem = cut(Problem.load(EXAMPLES / f"{name}.json"), 4, 6)
    each = islice(STREAMS["adaoffload"](problem, "makespan"), 8)
    first = next(each for each in each if any(has in str(op) for program in each.programs for op in program))
    frames = solver.frames(problem, milp_ops=1, time_limit_s=20.0, warm_start=Programs.from_schedule(first))
    found = schedules(frames, problem)
    assert found
    assert [check(problem, schedule) for schedule in found] == [[]] * len(found)
    assert found[-1].makespan_ms < first.makespan_ms or has == "C"  # this one is as short, and the program's own
    assert found[-1].method == "milp"
    assert any(has in str(op) for program in found[-1].programs for op in program)
    assert not any(isinstance(frame, Bound) for frame in frames)


def test_windows_find_what_is_shorter_and_end_there(solver: Solver) -> None:
    """AdaOffload's first schedule of 4 x 6 is far from the optimum; windows alone come near it."""
    problem = cut(Problem.load(EXAMPLES / "fastlink-8x16.json"), 4, 6)
    first = next(STREAMS["adaoffload"](problem, "makespan"))
    frames = solver.frames(problem, milp_ops=1, time_limit_s=20.0, warm_start=Programs.from_schedule(first))
    values = [schedule.makespan_ms for schedule in schedules(frames, problem)]
    assert [check(problem, schedule) for schedule in schedules(frames, problem)] == [[]] * len(values)
    assert values[-1] < 0.95 * first.makespan_ms
    assert not any(isinstance(frame, Bound) for frame in frames)


OVERTAKING = {
    "the second device starts with micro-batch 1; with micro-batch 0 its span is 34 ms": (
        problem_of([stage(0, (1, 2, 3), 1, 1, (9, 9, 1)), stage(1, (3, 1, 3), 1, 1, (9, 1, 1))], [2, 2], 3, 4.0),
        "span",
        33.0,
    ),
    "all stay": (LATE_START, "span", 20.0),
    "a backward overtakes another; in the paper's fixed order it takes 22 ms": (
        problem_of([stage(0, (1, 1, 1), 1, 1, (9, 1, 1)), stage(1, (3, 1, 1), 1, 1)], [2, 2], 3, 2.0),
        "makespan",
        21.0,
    ),
}


@pytest.mark.parametrize(("problem", "objective", "optimum"), OVERTAKING.values(), ids=OVERTAKING)
def test_the_optimum_may_need_micro_batches_that_overtake(
    solver: Solver, problem: Problem, objective: Objective, optimum: float
) -> None:
    values, bound = solver.solve(problem, objective)
    assert values[-1] == bound == optimum


@settings(max_examples=examples(40))
@given(problem=problems_of_every_sort().map(lasting), objective=st.sampled_from(["makespan", "span"]))
def test_every_incumbent_runs_and_fits(solver: Solver, problem: Problem, objective: Objective) -> None:
    assume(milp.unsupported(problem) is None)
    values, bound = solver.solve(problem, objective, time_limit_s=1)
    assert values
    assert values == sorted(values, reverse=True)
    assert bound <= values[-1] * (1 + 1e-9)


@pytest.mark.parametrize(
    "name", ["both offload", "full duplex", "two chunks", "a shared link", "three micro-batches, no offload"]
)
@pytest.mark.parametrize("switches", [Switches(order="entry"), WITHOUT_STEPS], ids=["all", "plain"])
def test_a_warm_start_satisfies_every_row(solver: Solver, name: str, switches: Switches) -> None:
    problem = EXHAUSTIVE[name]
    schedule = schedules(solver.frames(problem), problem)[-1]
    model = Model(problem, "makespan", schedule.makespan_ms, switches)
    x = np.array(model.rows.lower)
    start = assignment(model.variables, schedule)
    assert set(start) == set(np.flatnonzero(model.rows.binary).tolist())
    x[list(start)] = list(start.values())
    x = model.rows.earliest(x)
    x[model.variables.length] = schedule.makespan_ms * model.scale
    assert all(np.dot(value, x[index]) >= at_least - 1e-9 for index, value, at_least in model.rows.each())
    assert (x <= np.array(model.rows.upper) + 1e-9).all()
    assert check(problem, lift(problem, model.starts(x))) == []


def test_a_warm_start_may_move_some_parts_only(solver: Solver) -> None:
    """The model moves whole activations, so it is no start for the search, but still what is to be beaten."""
    parts = stage(0, (2, 2, 1), 2, 1, (2, 2, 2)) | {"offload_parts": 2}
    problem = problem_of([parts], [3], 2)
    one_part = Schedule.parse(problem, [["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]])
    assert check(problem, one_part) == []
    values, _ = solver.solve(problem, warm_start=Programs.from_schedule(one_part))
    assert all(value < one_part.makespan_ms for value in values)


def test_a_warm_start_that_is_no_schedule_does_no_harm(solver: Solver) -> None:
    values, _ = solver.solve(EXHAUSTIVE["both offload"], warm_start=Programs(programs=("0F0 0B0", "nonsense")))
    assert values[-1] == 24.0


def test_no_bound_where_the_model_cannot_express_every_choice(solver: Solver) -> None:
    """BW needs less memory than B where the weight gradient needs more than the activation; the model has no BW."""
    problem = problem_of([stage(0, (2, 2, 1), 2, 3, (3, 3, 2)), stage(1, (2, 2, 1), 1, 1)], [3, 2], 2)
    assert not any(isinstance(frame, Bound) for frame in solver.frames(problem))


def test_a_device_without_memory_is_no_fault(solver: Solver) -> None:
    """Only BW would fit, which the model does not have."""
    problem = problem_of([stage(0, (1, 1, 1), 1), stage(1, (1, 1, 1), 0, 5)], [1, 0], 1)
    start, *reports, end = solver.frames(problem)
    assert end == End()
    assert isinstance(start, Incumbent)
    assert start.method == "adaoffload"
    assert "milp: HiGHS: infeasible after " in notes(reports)[0]


def test_what_is_supported() -> None:
    away = stage(0, (2, 2, 1), 2, 1, (3, 3, 2))
    small = problem_of([away], [2], 3)
    assert milp.unsupported(small) is milp.unsupported(small.model_copy(update={"microbatches": 1000})) is None
    assert "some take none" in str(milp.unsupported(problem_of([stage(0, (2, 2, 0), 2, 1)], [2], 3)))
    for host_memory, fits in ((6, True), (5, False)):
        limited = problem_of([away], [2], 3, devices=[{"host_memory_bytes": host_memory}])
        assert (milp.unsupported(limited) is None) == fits


# The MILP counts bytes in units: what fits in units fits, and no bound is above a schedule that fits to the byte.
BYTES = st.one_of(st.integers(1, 30), st.integers(1, 2**46), st.integers(10**10 - 3, 10**10 + 3))
SIZES = st.integers(1, 2**18)  # in units
LEAST = 5 * TOLERANCE  # a solver may be off by one TOLERANCE in a row, and by one in each binary


@st.composite
def capacities(draw: st.DrawFn) -> tuple[list[tuple[int, bool]], int]:
    """Up to eight sizes, some of them equal or negative, of literals or their negations; and a limit: the sum of some
    of them, one more or one less."""
    kinds = draw(st.lists(SIZES, min_size=1, max_size=4))
    sizes = [draw(st.sampled_from(kinds)) * draw(st.sampled_from([1, 1, -1])) for _ in range(draw(st.integers(1, 8)))]
    limit = sum(draw(st.lists(st.sampled_from(sizes), max_size=len(sizes)))) + draw(st.integers(-1, 1))
    return [(size, draw(st.booleans())) for size in sizes], limit


@settings(max_examples=examples(150))
@given(capacities())
def test_rows_hold_exactly_where_the_sizes_fit(capacity: tuple[list[tuple[int, bool]], int]) -> None:
    sizes, limit = capacity
    rows = Rows()
    literals = [rows.new_literal() for _ in sizes]
    rows.add_capacity([(size, Literal(x.var, sign)) for (size, sign), x in zip(sizes, literals, strict=True)], limit)
    for values in product((0.0, 1.0), repeat=len(sizes)):
        x = np.array(values)
        held = sum(size for (size, sign), truth in zip(sizes, values, strict=True) if sign == bool(truth))
        missing = [(at_least - np.dot(value, x[index]), value) for index, value, at_least in rows.each()]
        assert (max((lacks for lacks, _ in missing), default=0.0) <= 1e-9) == (held <= limit)
        assert held <= limit or any(lacks > LEAST * (1 + np.abs(value).sum()) for lacks, value in missing)


@pytest.mark.parametrize("backend", ["highs", "gurobi"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_byte_less_than_three_activations_holds_two(solver: Solver, backend: str, odd: int) -> None:
    """Three of slowlink-8x16's stages. With an odd byte sizes are rounded, and 3 may seem to fit, or not to fit."""
    if backend == "gurobi":
        pytest.importorskip("gurobipy")
    size = 10_000_000_000 + odd
    costs = [stage(d, (12, 12, 11), size, 4_000_000_000, (40, 40, size)) for d in range(3)]
    for limit in (3 * size - 1, 3 * size - 4 * MIB, 3 * size):
        problem = problem_of(costs, [limit] * 3, 3)
        assert Units(problem).lossless == (not odd)
        values, bound = solver.solve(problem, solver=backend)
        best, other = (135.0, 163.0) if limit == 3 * size else (163.0, 135.0)
        if not odd or limit == 3 * size - 4 * MIB:
            assert values[-1] == bound == best
        else:
            assert bound <= best <= values[-1]
            assert {bound, values[-1]} <= {best, other}


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Memory of the first device is at a corner: the sum of some sizes, or a byte beside it. It is for one activation
    and less than two, so that the length depends on what may leave in time."""
    activation, kept, moved = sorted((draw(BYTES), draw(BYTES), draw(BYTES)), reverse=True)
    if draw(st.booleans()):
        kept, moved = moved, kept
    sums = {sum(some) for n in range(1, 4) for some in combinations([activation, kept, moved] * 2, n)}
    memory = draw(st.sampled_from(sorted(sums))) + draw(st.integers(-1, 1))
    stages = [stage(0, (2, 2, 1), activation, kept, (1, 2, moved)), stage(1, (3, 2, 1), 1, 1)]
    return problem_of(stages, [min(max(memory, activation), 2 * activation - 1), 1], 2)


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.soak)])
def test_no_byte_makes_a_bound_wrong(solver: Solver, examples: int) -> None:
    """Against every program there is: the bound is below the best, and equal to it where no size is rounded."""
    optima, is_lossless = set(), set()

    @settings(max_examples=examples)
    @given(tiny_problems())
    def holds(problem: Problem) -> None:
        best, _ = best_of_all(problem, "makespan")
        values, bound = solver.solve(problem)  # each schedule is checked to the byte
        assert all(frame.method for frame in solver.frames(problem) if isinstance(frame, Note))
        assert trivial_bound(problem) <= bound <= best * (1 + 1e-9)
        assert values[-1] >= best * (1 - 1e-9)
        if Units(problem).lossless:
            assert values[-1] == pytest.approx(best)
            assert bound == pytest.approx(best)
        optima.add(best)
        is_lossless.add(Units(problem).lossless)

    holds()
    assert len(optima) > 1  # bytes matter
    assert is_lossless == {False, True}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PuLP's own
def test_a_library_of_pulps_may_raise_anything_or_use_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS takes the place of what raises; what has used its time is not said to have ended."""
    pulp = pytest.importorskip("pulp")

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


@pytest.mark.usefixtures("scripted_solver")
def test_who_cancels_a_search_learns_how_far_it_was() -> None:
    search = improve(SPAN, method="ongoing", time_limit_s=60.0)
    assert next(search).notes == ()
    search.cancel()
    *_, last = search
    (note,) = last.notes
    assert re.fullmatch(r"milp: 2 windows; stopped after [\d.]+ s", note)
    assert last.reports == last.notes


@pytest.mark.usefixtures("scripted_solver")
def test_a_report_on_the_end_takes_the_place_of_those_before() -> None:
    *_, last = improve(SPAN, method="reports", time_limit_s=60.0)
    assert (last.notes, last.reports) == (("milp: 3 windows", "something else"), ("milp: 3 windows",))


@pytest.mark.usefixtures("scripted_solver")
def test_of_a_solver_that_said_nothing_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anytime, "GRACE_S", 0.0)
    monkeypatch.setattr(anytime, "LOADING_S", 0.0)
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
