"""OptPipe's MILP in a process of its own: highspy cannot be loaded beside ortools, which other tests use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from optpipe import Problem, check
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Note, Request
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.switches import ALL, Switches
from support.enumeration import length

DRIVER = """
import json, re, sys, time
from optpipe.process.protocol import End, Note, Request, keep_output_for_frames, write_frame
from optpipe_solver.milp import solve
from optpipe_solver.milp.switches import Switches

def keep(*given):
    global limits
    limits = Limits(*given)
    return limits

Limits, solve.Limits = solve.Limits, keep
keep_output_for_frames()
for line in sys.stdin:
    asked = json.loads(line)

    def write(frame):
        write_frame(frame)
        if isinstance(frame, Note) and re.search(asked["until"], frame.text):
            object.__setattr__(limits, "until", time.monotonic())

    request = Request.model_validate(asked["request"])
    solve.solve(request, write, Switches(**asked["switches"]))
    write_frame(End())
"""
NEVER = "(?!)"
FRAME: TypeAdapter[Frame] = TypeAdapter(Frame)


class Solver:
    """Sends requests to the process and reads its frames."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def frames(self, problem: Problem, switches: Switches = ALL, until: str = NEVER, **asked: Any) -> list[Frame]:
        """All but the reports of searches that go on. Time is up with a note that has `until`."""
        said = self.said(problem, switches, until, **asked)
        return [frame for frame in said if not (isinstance(frame, Note) and frame.ongoing)]

    def said(self, problem: Problem, switches: Switches = ALL, until: str = NEVER, **asked: Any) -> list[Frame]:
        assert self._process.stdin
        assert self._process.stdout
        request = Request(problem=problem, method="milp", **{"solver": "highs"} | asked).model_dump(mode="json")
        self._process.stdin.write(json.dumps({"request": request, "switches": asdict(switches), "until": until}) + "\n")
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


@contextmanager
def solver_process() -> Iterator[Solver]:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Solver(process)
        process.kill()
