"""The MILP of a window of a schedule, and the search that goes from window to window."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import EXHAUSTIVE, best_of_all, problem_of, stage
from support.milp import Solver, solver_process

from optpipe import Kind, Op, Problem, Schedule, check
from optpipe.evaluate.objective import Objective
from optpipe.lift import lift
from optpipe.process.protocol import End, Incumbent, Note, Programs
from optpipe_solver import milp
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.schedule_graph import ScheduleGraph, split_if_it_fits
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.surroundings import OpenWindow, Surroundings
from optpipe_solver.milp.switches import Order, Switches
from optpipe_solver.systems import generate

TIGHT = [stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(4)]
PROBLEMS = {
    "one chunk": problem_of(TIGHT, [15] * 4, 8),
    "uneven, full duplex": problem_of(
        [
            stage(0, (9.5, 11, 8), 4, 2, (7, 9, 3)),
            stage(1, (10, 9, 7.25), 6, 1),
            stage(2, (12, 10, 9), 5, 6, (20, 5, 5)),
        ],
        [9, 13, 13],
        7,
        2.0,
        transfer_mode="full_duplex",
    ),
    "two chunks": problem_of(TIGHT + [stage(d, (5, 6, 5), 3, 1, (4, 4, 3)) for d in (3, 2, 1, 0)], [17] * 4, 6),
    "a shared link": problem_of(
        TIGHT, [17] * 4, 6, devices=[{"link": "a"}, {"link": "a"}, {"link": "b"}, {"link": "b"}]
    ),
    "parts": problem_of([s | {"offload_parts": 2} for s in TIGHT], [15] * 4, 6),
}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


def start_of(problem: Problem, heuristic: str) -> Schedule:
    return next(STREAMS[heuristic](problem, "makespan"))


def windows_of(graph: ScheduleGraph, number: int) -> Iterator[OpenWindow]:
    chance, devices = random.Random(number), range(len(graph.problem.devices))
    for _ in range(number):
        begin = chance.uniform(-0.2, 0.9) * graph.end_ms
        end = begin + chance.uniform(0.05, 0.6) * graph.end_ms
        yield OpenWindow(begin, end, frozenset(chance.sample(devices, chance.randint(1, len(devices)))))


def incumbents() -> Iterator[tuple[str, str, Order]]:
    """Problem, heuristic and order, without those whose schedule no window can hold: it needs BWs, or lets
    micro-batches overtake."""
    orders: tuple[Order, Order] = ("none", "stages")
    for name, heuristic in product(PROBLEMS, ["adaoffload", "zb-auto", "naive"]):
        known = ScheduleGraph(split_if_it_fits(start_of(PROBLEMS[name], heuristic)))
        yield from [
            (name, heuristic, order) for order in orders if known.expressible and (order == "none" or known.in_order)
        ]


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(("name", "heuristic", "order"), list(incumbents()))
def test_an_incumbent_satisfies_every_row_of_its_windows(
    name: str, heuristic: str, order: Order, objective: Objective
) -> None:
    problem = PROBLEMS[name]
    graph = ScheduleGraph(split_if_it_fits(start_of(problem, heuristic)), objective)
    solved = 0
    for window in windows_of(graph, 12):
        if solved == 4:
            break
        model = Model(problem, "makespan", graph.end_ms, Switches(order=order), Surroundings(graph, window))
        if not model.possible:
            continue  # nothing shorter
        solved += 1
        x = np.array(model.rows.lower)
        given = assignment(model.variables, graph.schedule)
        assert set(given) == set(np.flatnonzero(model.rows.binary).tolist())
        x[list(given)] = list(given.values())
        x = model.rows.earliest(x)
        assert x[model.C] / model.scale <= graph.end_ms + 1e-6
        begins, index, value = model.rows.matrix()
        sums = np.array([value[a:b] @ x[index[a:b]] for a, b in pairwise(begins)])
        assert (sums >= np.array(model.rows.at_least) - 1e-7).all()
        assert (x <= np.array(model.rows.upper) + 1e-7).all()
        lifted = lift(problem, model.starts(x))
        assert check(problem, lifted) == []
        assert lifted.makespan_ms <= x[model.C] / model.scale + 1e-6
    assert solved


def test_what_was_dropped_before_the_end_of_a_window_still_is() -> None:
    """Also where the first op after the window, such as a W, takes no memory itself: later ones count on the drop."""
    graph = ScheduleGraph(split_if_it_fits(start_of(PROBLEMS["one chunk"], "adaoffload")))
    frees = 0
    for window in windows_of(graph, 60):
        around = Surroundings(graph, window)
        model = Model(graph.problem, "makespan", graph.end_ms, Switches(order="none"), around)
        for a in model.variables.activations if model.possible else ():
            border = around.border.get(graph.problem.stages[a[0]].device)
            if border is None or not around.transfers[a].made or graph.parts(Kind.D, a)[-1] >= border:
                continue
            op = graph.ops[border]
            number = model.paths.number[op]
            known = Op(Kind.B, *a) in model.paths.number and model.paths.precedes(
                model.paths.number[Op(Kind.B, *a)], number
            )
            if not known and op != Op(Kind.B, *a):
                assert (a, number) in model.variables.M
                frees += op.kind == Kind.W
    assert frees


SOLVE = """
import json, sys, time
from optpipe import Schedule, check
from optpipe.lift import lift
from optpipe_solver.milp.backend import minimize
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.schedule_graph import ScheduleGraph
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.surroundings import OpenWindow, Surroundings
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.task import Limits, Task
from support.enumeration import EXHAUSTIVE
for line in sys.stdin:
    name, programs, links, windows, order = json.loads(line)
    problem = EXHAUSTIVE[name]
    graph = ScheduleGraph(Schedule.parse(problem, programs, links))
    values = []
    for begin, end, devices in windows:
        around = Surroundings(graph, OpenWindow(begin, end, frozenset(devices)))
        model = Model(problem, "makespan", graph.end_ms, Switches(order=order), around)
        found = [graph.end_ms]
        def take(x):
            schedule = lift(problem, model.starts(x))
            assert check(problem, schedule) == []
            assert schedule.makespan_ms <= x[model.C] / model.scale + 1e-5
            found.append(schedule.makespan_ms)
        if model.possible:
            start, limits = assignment(model.variables, graph.schedule), Limits(time.monotonic() + 60, 1, 0)
            minimize("highs", Task(model.rows, model.C, start, limits, take, lambda bound: None), sys.exit)
        values.append(min(found))
    print(json.dumps(values), flush=True)
"""


def solved_windows(name: str, schedule: Schedule, windows: list[OpenWindow], order: Order) -> list[float]:
    """The length of the best schedule that the window's model finds, for each window, proven."""
    programs = [list(program.texts()) for program in schedule.programs]
    links = {link: list(order.texts()) for link, order in schedule.links.items()}
    asked = [(window.begin, window.end, sorted(window.devices)) for window in windows]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    line = json.dumps([name, programs, links, asked, order]) + "\n"
    command = [sys.executable, "-c", SOLVE]
    found: list[float] = json.loads(
        subprocess.run(command, input=line, stdout=subprocess.PIPE, check=True, env=environment, text=True).stdout
    )
    return found


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_a_window_of_everything_has_the_best_of_all_programs(name: str) -> None:
    """From the worst start that there is; smaller windows find something between."""
    problem = EXHAUSTIVE[name]
    schedule = split_if_it_fits(start_of(problem, "naive"))
    best, _ = best_of_all(problem, "makespan")
    end, every = schedule.makespan_ms, frozenset(range(len(problem.devices)))
    windows = [
        OpenWindow(0.0, end + 1, every),
        OpenWindow(0.0, end / 2, every),
        OpenWindow(end / 3, end + 1, every),
        OpenWindow(end / 4, 3 * end / 4, every),
        OpenWindow(0.0, end + 1, frozenset([0])),
    ]
    values = solved_windows(name, schedule, windows, "none")
    assert values[0] == pytest.approx(best)
    assert all(best - 1e-6 <= value <= schedule.makespan_ms for value in values)


def test_windows_improve_what_is_too_large_for_one_model(solver: Solver) -> None:
    problem = problem_of(TIGHT, [15] * 4, 9)
    assert milp.ENGINE.unsupported(problem, alone=False) is not None
    assert milp.ENGINE.unsupported(problem, alone=True) is None
    naive = start_of(problem, "naive")
    values, _ = solver.solve(problem, warm_start=Programs.of(naive), time_limit_s=200, until=" 2 shorter")
    assert len(values) >= 2
    assert values[0] < naive.makespan_ms
    assert values == sorted(values, reverse=True)


def test_windows_minimize_the_span_where_it_is_asked_for(solver: Solver) -> None:
    problem = problem_of([stage(d, (5, 5, 4), 5, 2) for d in range(4)], [99] * 4, 5, p2p_ms=0.5)
    start = Programs.of(generate("zb-h1", problem))  # 94 ms
    values, _ = solver.solve(problem, "span", warm_start=start, milp_ops=1, time_limit_s=60.0)
    assert values[-1] == trivial_bound(problem, "span") == 87.0


def test_of_a_schedule_that_is_proven_one_window_is_solved(solver: Solver) -> None:
    """A bound without search says that nothing is shorter; asked for by name, the model is built and solved."""
    problem = Problem.load(Path(__file__).parents[2] / "examples" / "problems" / "figure4-4x6.json")
    start = start_of(problem, "adaoffload")
    assert start.makespan_ms == trivial_bound(problem)
    frames = solver.frames(problem, warm_start=Programs.of(start), milp_ops=1, time_limit_s=60.0)
    (report,) = [frame.text for frame in frames if isinstance(frame, Note)]
    assert report.startswith("milp: 1 window by HiGHS: 1 optimal, 0 shorter; ")
    assert report.endswith(" s; proven optimal by a bound without search; 21 ms")


def test_windows_begin_with_adaoffload(solver: Solver) -> None:
    problem = problem_of(TIGHT, [15] * 4, 9)
    values, _ = solver.solve(problem, time_limit_s=1)
    assert values[0] == start_of(problem, "adaoffload").makespan_ms


def test_a_schedule_that_recomputes_is_left_alone(solver: Solver) -> None:
    again = [
        {k: v for k, v in s.items() if "load" not in k} | {"recompute_ms": 5.0, "checkpoint_bytes": 1} for s in TIGHT
    ]
    problem = problem_of(again, [8] * 4, 9)
    program = [[f"{s}{kind}{j}" for j in range(9) for kind in ("F", "C", "B", "W")] for s in range(4)]
    schedule = Schedule.parse(problem, program)
    assert check(problem, schedule) == []
    (note, report, end) = solver.frames(problem, warm_start=Programs.of(schedule))
    assert isinstance(report, Note)
    assert report.text.startswith("milp: no window: ")
    assert isinstance(note, Note)
    assert note.text == (
        "the MILP has no recompute, no pairs, no single parts, and BW only as B and W, so it does not improve a "
        "schedule that needs them; cpsat and lns do"
    )
    assert end == End()


def test_a_backend_that_is_missing_is_said_once(solver: Solver) -> None:
    pytest.importorskip("pulp")
    problem = problem_of(TIGHT, [15] * 4, 9)
    frames = solver.frames(problem, solver="pulp:mipcl", time_limit_s=2)
    assert len([frame for frame in frames if isinstance(frame, Note) and not frame.method]) == 1
    assert [frame for frame in frames if isinstance(frame, Incumbent)]
