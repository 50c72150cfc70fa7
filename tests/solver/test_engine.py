"""The engine process: it does what the request says, and dies with its parent even while native code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import problems
from support.frames import schedules

from optpipe import Problem, SolverError, check
from optpipe.process.child import Child
from optpipe.process.protocol import End, Note, Request

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
    assert last == End()
    found = schedules(frames, problem)
    assert [check(problem, schedule) for schedule in found] == [[]] * len(found) != []


def test_the_time_limit_holds() -> None:
    request = Request(problem=pipeline(4, 8), method="milp", time_limit_s=1.5)
    *_, report, last = Child("optpipe_solver.engines", request).frames()
    assert last == End()
    assert isinstance(report, Note)
    spent = re.match(r"milp: HiGHS: time is up after ([\d.]+) s ", report.text)
    assert spent, report.text
    assert float(spent[1]) < 30.0


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
