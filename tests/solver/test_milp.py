"""OptPipe's MILP against every program there is (on tiny problems), against `check` (on random ones), and its refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from optpipe import Problem, Schedule, check, simulate
from optpipe.child import Bound, End, Frame, Incumbent, Objective, Programs, Request
from optpipe.errors import ScheduleError
from optpipe.memory import certify
from optpipe.ops import Kind, Op
from optpipe.program import Program
from optpipe_solver import milp
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.lift import lift
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.start import assignment

# highspy cannot be loaded beside ortools, which other tests use: one process runs the MILP for all tests here.
DRIVER = """
import sys
from optpipe.child import End, Request, write_frame
from optpipe_solver import milp
for line in sys.stdin:
    milp.run(Request.model_validate_json(line), write_frame)
    write_frame(End())
"""
FRAME: TypeAdapter[Frame] = TypeAdapter(Frame)


class Solver:
    """Sends requests to the process and reads its frames."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def frames(self, problem: Problem, **asked: Any) -> list[Frame]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(Request(problem=problem, method="milp", **asked).model_dump_json() + "\n")
        self._process.stdin.flush()
        found: list[Frame] = []
        while not found or not isinstance(found[-1], End):
            found.append(FRAME.validate_json(self._process.stdout.readline()))
        return found

    def solve(self, problem: Problem, objective: Objective = "makespan", **asked: Any) -> tuple[list[float], float]:
        """Values of the incumbents, each checked, and the best bound known."""
        values, bound = [], trivial_bound(problem, objective)
        for frame in self.frames(problem, objective=objective, **asked):
            if isinstance(frame, Incumbent):
                schedule = frame.schedule.schedule(problem, frame.method)
                assert check(problem, schedule) == []
                values.append(length(schedule, objective))
            elif isinstance(frame, Bound):
                bound = max(bound, frame.lower_bound_ms)
        return values, bound


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Solver(process)
        process.kill()


def length(schedule: Schedule, objective: Objective) -> float:
    return schedule.makespan_ms if objective == "makespan" else schedule.span_ms


def problem_of(stages: list[dict[str, Any]], memory: list[int], microbatches: int, p2p_ms: float = 1.0, **fields: Any) -> Problem:
    devices = fields.pop("devices", [{} for _ in memory])
    return Problem.from_dict(
        {
            "microbatches": microbatches,
            "p2p_ms": p2p_ms,
            "devices": [{"memory_bytes": size, **device} for size, device in zip(memory, devices, strict=True)],
            "stages": stages,
            **fields,
        }
    )


def stage(
    device: int, ms: tuple[float, float, float], size: int, kept: int = 0, away: tuple[float, float, int] | None = None
) -> dict[str, Any]:
    """A stage from (F, B, W) times, its activation, what B leaves of it, and (offload, reload, bytes) if it can leave."""
    costs = dict(zip(("forward_ms", "backward_input_ms", "backward_weight_ms"), ms, strict=True))
    offload = dict(zip(("offload_ms", "reload_ms", "offload_bytes"), away, strict=True)) if away else {}
    return {"device": device, "activation_bytes": size, "weight_grad_bytes": kept} | costs | offload


SPLIT, FUSED = (Kind.B, Kind.W), (Kind.BW,)
AWAY = (Kind.O, Kind.D, Kind.R)


def merged(chains: list[tuple[Op, ...]]) -> Iterator[tuple[Op, ...]]:
    """Every interleaving of chains."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        if chain:
            for rest in merged([*chains[:i], chain[1:], *chains[i + 1 :]]):
                yield (chain[0], *rest)


def programs_of(problem: Problem, device: int) -> list[Program]:
    """Every list of ops that a device can run within its memory: all orders, all choices of offload and of BW, all places of O, D and R."""
    passes = [(s, j) for j in range(problem.microbatches) for s in problem.route(j) if problem.stages[s].device == device]
    backs = (SPLIT, FUSED) if problem.microbatches < 3 else (SPLIT,)  # or there are too many
    choices = [product(((), AWAY) if problem.stages[s].can_offload else ((),), backs) for s, _ in passes]
    found = []
    for chosen in product(*choices):
        chains = [tuple(Op(k, s, j) for k in (Kind.F, *away, *back)) for (away, back), (s, j) in zip(chosen, passes, strict=True)]
        for ops in merged(chains):
            alone = Schedule(problem, tuple(Program.of(ops if d == device else ()) for d in range(len(problem.devices))))
            if certify(problem, alone).fits:
                found.append(Program.of(ops))
    return found


def shared_orders(problem: Problem, programs: tuple[Program, ...]) -> Iterator[dict[str, Program]]:
    """Every order of the transfers on the one link that devices share, if any."""
    if not problem.shared_links:
        yield {}
        return
    ((link, sharers),) = problem.shared_links.items()
    transfers = [tuple(op for op in programs[d].ops() if op.kind in (Kind.O, Kind.R)) for d in sharers]
    for order in merged(transfers):
        yield {link: Program.of(order)} if order else {}


def best_of_all(problem: Problem, objective: Objective) -> tuple[float, int]:
    """The least value over all schedules there are, and how many were tried. Micro-batches are alike: 0 enters the pipeline first."""
    first = problem.stages[0].device
    candidates = [programs_of(problem, d) for d in range(len(problem.devices))]
    if problem.routes is None:
        entries = [Op(Kind.F, 0, j) for j in range(problem.microbatches)]
        candidates[first] = [p for p in candidates[first] if [op for op in p.ops() if op in entries] == entries]
    best, tried = float("inf"), 0
    for programs in product(*candidates):
        for links in shared_orders(problem, programs):
            schedule = Schedule(problem, programs, links)
            tried += 1
            try:
                timeline = simulate(problem, schedule)
            except ScheduleError:
                continue
            best = min(best, timeline.makespan_ms if objective == "makespan" else timeline.span_ms)
    return best, tried


FAR = (2, 3, 1), (3, 2, 2)
EXHAUSTIVE: dict[str, Problem] = {
    "memory for one, one device can offload": problem_of([stage(0, (2, 2, 1), 1, 1, (3, 3, 1)), stage(1, (2, 2, 1), 1, 1)], [1, 2], 2),
    "both offload": problem_of([stage(0, FAR[0], 2, 1, (2, 2, 2)), stage(1, FAR[1], 2, 1, (4, 1, 2))], [2, 2], 2, 3.0),
    "full duplex": problem_of(
        [stage(0, FAR[0], 2, 1, (2, 2, 2)), stage(1, FAR[1], 2, 1, (4, 1, 2))], [2, 2], 2, 3.0, transfer_mode="full_duplex"
    ),
    "a shared link": problem_of(
        [stage(0, (1, 1, 1), 1, 1, (6, 6, 1)), stage(0, (2, 1, 1), 1, 1), stage(1, (1, 2, 1), 1, 1, (4, 9, 1)), stage(1, (2, 1, 2), 1)],
        [1, 1],
        1,
        routes=[[0, 2, 1, 3]],
        devices=[{"link": "pcie"}] * 2,
    ),
    "a slow offload of a part": problem_of([stage(0, FAR[0], 3, 1, (6, 1, 2)), stage(1, FAR[1], 2, 1)], [4, 2], 2, 3.0),
    "three micro-batches, no offload": problem_of([stage(0, (2, 3, 1), 3, 2), stage(1, (1, 2, 2), 1, 1)], [6, 1], 3),
    "two chunks": problem_of(
        [stage(0, (2, 2, 1), 1, 1, (2, 2, 1)), stage(1, (3, 2, 1), 1, 1), stage(0, (1, 3, 1), 1, 1, (2, 3, 1))], [1, 1], 1
    ),
    "two directions": problem_of(
        [stage(0, (2, 2, 1), 1), stage(1, (3, 2, 1), 1), stage(1, (2, 2, 1), 1), stage(0, (1, 3, 1), 1)],
        [1, 2],
        2,
        routes=[[0, 1], [2, 3]],
        microbatch_routes=[0, 1],
    ),
}


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_the_optimum_is_the_best_of_all_programs(solver: Solver, name: str) -> None:
    problem = EXHAUSTIVE[name]
    best, tried = best_of_all(problem, "makespan")
    values, bound = solver.solve(problem)
    assert tried > 10
    assert values[-1] == pytest.approx(best)
    assert bound == pytest.approx(best)


def test_the_optimum_of_the_span(solver: Solver) -> None:
    problem = problem_of([stage(0, (1, 3, 2), 1, 1, (2, 5, 1)), stage(1, (5, 2, 9), 1)], [1, 2], 2, 4.0)
    best, _ = best_of_all(problem, "span")
    assert best < best_of_all(problem, "makespan")[0]
    values, bound = solver.solve(problem, "span")
    assert values[-1] == pytest.approx(best)
    assert bound == pytest.approx(best)


def test_a_backward_may_overtake_another(solver: Solver) -> None:
    """Not without loss does the paper fix the order of the micro-batches: keeping it takes 22 ms here."""
    problem = problem_of([stage(0, (1, 1, 1), 1, 1, (9, 1, 1)), stage(1, (3, 1, 1), 1, 1)], [2, 2], 3, 2.0)
    values, bound = solver.solve(problem)
    assert values[-1] == bound == 21.0


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Two or three stages on one or two devices, tight or ample memory, every kind of link."""
    number = st.integers(1, 4)
    placement = draw(st.sampled_from([[0], [0, 1], [0, 1, 0], [0, 1, 1]]))
    stages = []
    for device in placement:
        size = draw(number)
        away = (draw(number), draw(number), draw(st.integers(1, size))) if draw(st.booleans()) else None
        stages.append(stage(device, (draw(number), draw(number), draw(number)), size, draw(st.integers(0, size + 1)), away))
    needs = [sum(max(s["activation_bytes"], s["weight_grad_bytes"]) for s in stages if s["device"] == d) for d in sorted(set(placement))]
    return problem_of(
        stages,
        [need + draw(st.integers(0, 6)) for need in needs],
        draw(st.integers(1, 3)),
        float(draw(st.integers(0, 4))),
        devices=[{"link": "pcie"} if draw(st.booleans()) else {} for _ in needs],
        transfer_mode=draw(st.sampled_from(["half_duplex", "full_duplex"])),
    )


@settings(max_examples=40)
@given(problem=problems(), objective=st.sampled_from(["makespan", "span"]))
def test_every_incumbent_runs_and_fits(solver: Solver, problem: Problem, objective: Objective) -> None:
    assert milp.applies(problem)
    values, bound = solver.solve(problem, objective, time_limit_s=3)
    assert values
    assert values == sorted(values, reverse=True)
    assert bound <= values[-1] * (1 + 1e-9)


def test_a_warm_start_is_where_the_search_begins(solver: Solver) -> None:
    problem = EXHAUSTIVE["both offload"]
    *_, best, _ = [f for f in solver.frames(problem) if isinstance(f, Incumbent | End)]
    assert isinstance(best, Incumbent)
    frames = solver.frames(problem, warm_start=best.schedule)
    assert [frame for frame in frames if isinstance(frame, Incumbent)] == []  # nothing is better
    assert max(frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)) == 24.0


@pytest.mark.parametrize("name", ["both offload", "full duplex", "two chunks", "a shared link", "three micro-batches, no offload"])
def test_a_warm_start_satisfies_every_row(solver: Solver, name: str) -> None:
    problem = EXHAUSTIVE[name]
    incumbents = [frame for frame in solver.frames(problem) if isinstance(frame, Incumbent)]
    schedule = incumbents[-1].schedule.schedule(problem, "milp")
    model = Model(problem, "makespan", schedule.makespan_ms, fixed_order=False)
    x = np.array(model.rows.lower)
    given = assignment(model, schedule)
    assert set(given) == set(np.flatnonzero(model.rows.binary).tolist())
    x[list(given)] = list(given.values())
    x = model.rows.earliest(x)
    x[model.C] = schedule.makespan_ms * model.scale
    begins, index, value = model.rows.matrix()
    sums = [value[a:b] @ x[index[a:b]] for a, b in pairwise(begins)]
    assert (np.array(sums) >= np.array(model.rows.at_least) - 1e-9).all()
    assert (x <= np.array(model.rows.upper) + 1e-9).all()
    assert check(problem, lift(problem, model.starts(x))) == []


def test_a_warm_start_that_is_no_schedule_does_no_harm(solver: Solver) -> None:
    values, _ = solver.solve(EXHAUSTIVE["both offload"], warm_start=Programs(programs=("0F0 0B0", "nonsense")))
    assert values[-1] == 24.0


def test_no_bound_where_the_model_cannot_express_every_choice(solver: Solver) -> None:
    """BW needs less memory than B where the weight gradient needs more than the activation; the model has no BW."""
    problem = problem_of([stage(0, (2, 2, 1), 2, 3, (3, 3, 2)), stage(1, (2, 2, 1), 1, 1)], [3, 2], 2)
    assert not any(isinstance(frame, Bound) for frame in solver.frames(problem))


def test_applies() -> None:
    small = problem_of([stage(0, (2, 2, 1), 2, 1, (3, 3, 2))], [2], 3)
    assert milp.applies(small)
    assert not milp.applies(small.model_copy(update={"microbatches": 1000}))
    assert not milp.applies(problem_of([stage(0, (2, 2, 0), 2, 1)], [2], 3))
    assert milp.applies(problem_of([stage(0, (2, 2, 1), 2, 1, (3, 3, 2))], [2], 3, devices=[{"host_memory_bytes": 6}]))
    assert not milp.applies(problem_of([stage(0, (2, 2, 1), 2, 1, (3, 3, 2))], [2], 3, devices=[{"host_memory_bytes": 5}]))
