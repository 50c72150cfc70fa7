"""The engine process: it does what the request says, and dies with its parent even while native code runs. On real
models an engine, a heuristic or a published schedule that fails is a fault, not a note."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import problems
from support.frames import schedules
from support.problems import with_budgets
from support.processes import over, until

from optpipe import InputError, Problem, SolverError, check, improve
from optpipe.process.child import Child
from optpipe.process.protocol import End, Note, Ready, Request
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_solver.methods import ENGINES

PRINTS = """
import os, sys

sys.path.remove(os.path.dirname(__file__))
del sys.modules["highspy"]
import highspy

class Highs(highspy.Highs):
    def __init__(self):
        super().__init__()
        os.write(1, b"Running HiGHS\\n")

highspy.Highs = Highs
"""


def pipeline(devices: int, microbatches: int) -> Problem:
    stage = problems.stage((10, 10, 8), (5, 2), offload=(12, 12, 5))
    return problems.pipeline(devices, microbatches, 15, stage, p2p_ms=1.0)


@contextmanager
def engine(request: Request, own_group: bool) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "optpipe_solver.engines"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=own_group
    ) as process:
        assert process.stdin
        process.stdin.write(request.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("own_group", [True, False])
def test_the_engine_dies_as_soon_as_its_input_closes(own_group: bool) -> None:
    with engine(Request(problem=pipeline(4, 8), method="milp", time_limit_s=600), own_group) as process:
        assert process.stdin
        assert process.stdout
        assert any(b"incumbent" in line for line in process.stdout)  # HiGHS is at work
        time.sleep(0.3)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(100) != 0  # not the ten minutes


def test_the_engine_solves_and_ends_and_what_a_library_prints_is_no_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS 1.16 prints its version whatever its options."""
    (tmp_path / "highspy.py").write_text(PRINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    problem = pipeline(2, 3)
    *frames, last = Child("optpipe_solver.engines", Request(problem=problem, method="milp", time_limit_s=30)).frames()
    assert isinstance(last, End)
    found = schedules(frames, problem)
    assert [check(problem, schedule) for schedule in found] == [[]] * len(found) != []


def test_the_time_limit_holds() -> None:
    request = Request(problem=pipeline(4, 8), method="milp", time_limit_s=1.5)
    *_, report, last = Child("optpipe_solver.engines", request).frames()
    assert isinstance(last, End)
    assert isinstance(report, Note)
    spent = re.match(r"milp: HiGHS: time is up after ([\d.]+) s ", report.text)
    assert spent, report.text
    assert float(spent[1]) < 30.0


def test_one_process_runs_one_engine_after_the_other_as_if_it_were_new() -> None:
    """With one thread, where work is counted, each finds the same as in a process of its own."""
    small = Request(problem=pipeline(2, 3), method="lns", time_limit_s=600.0)  # which it solves whole
    counted = Request(problem=pipeline(4, 6), method="dispatch", time_limit_s=2.0)
    others = [counted.model_copy(update={"method": method}) for method in ("anneal", "relax")]
    asked = [counted, *others, small, small.model_copy(update={"method": "cpsat"}), counted]
    child = Child("optpipe_solver.engines", asked[0])
    pid, found = child.pid, [list(child.frames(stays=True))]
    for request in asked[1:]:
        assert child.waits
        child.ask(request)
        found.append(list(child.frames(stays=True)))
    assert child.pid == pid
    assert found[0] == found[-1] != found[1]
    assert found[:-1] == [list(Child("optpipe_solver.engines", request).frames()) for request in asked[:-1]]
    child.close()
    assert over(pid)


def test_a_process_may_load_before_it_is_asked() -> None:
    request = Request(problem=pipeline(4, 6), method="dispatch", time_limit_s=1.0)
    child = Child("optpipe_solver.engines", None)
    until(lambda: "llvmlite" in Path(f"/proc/{child.pid}/maps").read_text())  # numba's compiler is there
    assert child.waits
    child.ask(request)
    assert not child.waits
    assert list(child.frames()) == list(Child("optpipe_solver.engines", request).frames())


@pytest.mark.parametrize("method", ["dispatch", "lns"])
def test_an_engine_that_is_asked_to_end_does_so_and_the_next_request_is_as_in_a_new_process(method: str) -> None:
    endless = Request(problem=pipeline(8, 24), method=method, time_limit_s=3600.0, threads=2)
    child = Child("optpipe_solver.engines", endless)
    frames = child.frames(stays=True)
    assert isinstance(next(frames), Ready)
    child.end_soon()
    assert isinstance([*frames][-1], End)
    child.end_soon()  # late: it has ended
    asked = Request(problem=pipeline(4, 6), method="anneal", time_limit_s=1.0)
    child.ask(asked)
    assert [*child.frames()] == [*Child("optpipe_solver.engines", asked).frames()]


def test_an_engine_that_waits_dies_with_its_parent() -> None:
    with engine(Request(problem=pipeline(2, 2), method="dispatch", time_limit_s=0.1), True) as process:
        assert process.stdin
        assert process.stdout
        assert any(b'"end"' in line for line in process.stdout)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(100) != 0


def test_an_unknown_method_is_one_sentence() -> None:
    with pytest.raises(SolverError, match=r"method = 'simplex': the engines are dispatch, .*milp, relax$"):
        list(Child("optpipe_solver.engines", Request(problem=pipeline(2, 2), method="simplex")).frames())


def test_only_the_named_engine_is_loaded() -> None:
    code = (
        "import sys; from optpipe.process.protocol import Request; from optpipe_solver import milp\n"
        "request = Request.model_validate_json(sys.stdin.read())\n"
        "assert milp.unsupported(request.problem) is None and 'highspy' not in sys.modules\n"
        "milp.run(request, print)\n"
        "assert 'highspy' in sys.modules and 'ortools' not in sys.modules\n"
    )
    request = Request(problem=pipeline(2, 2), method="milp", time_limit_s=10).model_dump_json()
    assert subprocess.run([sys.executable, "-c", code], input=request, text=True, capture_output=True).returncode == 0


SHAPES: list[dict[str, Any]] = [
    {"pp": 4, "tp": 8, "dp": 8, "zero": 3},
    {"pp": 8, "tp": 8, "dp": 8, "zero": 1, "chunks": 2},
    {"pp": 4, "tp": 8, "dp": 8, "zero": 1, "chunks": 2, "shape": "v"},
    {"pp": 16, "tp": 8, "dp": 8, "zero": 1},
]
FAULTS = ("failed", "rejected", "gives no schedule", "claims a bound", "Error")


def posed(model: str, memory: float = 1.0, per_device: int = 4, **shape: Any) -> Problem:
    """A model on H100s with a share of the memory that is left for its activations."""
    run = Run(microbatches=per_device * shape["pp"])
    problem = estimate(MODELS[model], Parallelism.from_dict(shape, "shape"), GPUS["H100"], run).problem
    return with_budgets(problem, [round(memory * device.activation_budget_bytes) for device in problem.devices])


def no_engine_fails(problem: Problem, **options: Any) -> None:
    *_, last = improve(problem, **options)
    assert [note for note in last.notes if any(fault in note for fault in FAULTS)] == []
    assert (last.failure, last.rejected) == (None, 0)


@pytest.mark.soak  # half an hour
@pytest.mark.parametrize("placements", ["keep", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize("model", sorted(MODELS))
def test_no_engine_fails_on_any_model(model: str, shape: dict[str, Any], placements: str) -> None:
    memory = (1.0, 0.5, 0.2)[sorted(MODELS).index(model) % 3]
    try:
        problem = posed(model, memory, **shape)
    except InputError as error:
        pytest.skip(str(error))  # too large for these GPUs, or fewer layers than stages
    no_engine_fails(problem, time_limit_s=10.0, placements=placements)


@pytest.mark.soak
@pytest.mark.parametrize("method", [*ENGINES, "auto"])
@pytest.mark.parametrize("options", [{}, {"objective": "span"}, {"threads": 1}], ids=str)
def test_nor_by_itself_on_many_micro_batches(method: str, options: dict[str, Any]) -> None:
    problem = posed("llama-3-405b", per_device=8, pp=16, tp=8, dp=8, zero=1)
    no_engine_fails(problem, method=method, time_limit_s=30.0 if method == "auto" else 10.0, **options)
