"""OptPipe's MILP in a process of its own: highspy cannot be loaded beside ortools, which other tests use."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from optpipe import Problem, check
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import End, Frame, Note, Request
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.variables import ALL, Switches
from support.frames import bounds, schedules
from support.oracles.enumeration import length

DRIVER = """
import json, sys
from contextlib import nullcontext
from optpipe.process.protocol import End, Request, keep_output_for_frames, write_frame
from optpipe_solver.milp.search import solve
from optpipe_solver.milp.variables import Switches
from support.oracles.effects import effects

keep_output_for_frames()
for line in sys.stdin:
    asked = json.loads(line)
    with effects(asked["table"]) if asked["table"] else nullcontext():
        solve(Request.model_validate(asked["request"]), write_frame, Switches(**asked["switches"]))
    write_frame(End())
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
FRAME: TypeAdapter[Frame] = TypeAdapter(Frame)


class Solver:
    """Sends requests to the process and reads its frames."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def frames(self, problem: Problem, switches: Switches = ALL, **asked: Any) -> list[Frame]:
        """All but the reports of searches that go on."""
        frames = self.all_frames(problem, switches, **asked)
        return [frame for frame in frames if not (isinstance(frame, Note) and frame.ongoing)]

    def all_frames(self, problem: Problem, switches: Switches = ALL, table: str = "", **asked: Any) -> list[Frame]:
        """`table`: the name of a table of effects to be in place."""
        assert self._process.stdin
        assert self._process.stdout
        request = Request(problem=problem, method="milp", **{"solver": "highs"} | asked).model_dump(mode="json")
        self._process.stdin.write(json.dumps({"request": request, "switches": asdict(switches), "table": table}) + "\n")
        self._process.stdin.flush()
        frames: list[Frame] = []
        while not frames or not isinstance(frames[-1], End):
            frames.append(FRAME.validate_json(self._process.stdout.readline()))
        return frames

    def solve(self, problem: Problem, objective: Objective = "makespan", **asked: Any) -> tuple[list[float], float]:
        """Values of the incumbents, each checked, and the best bound known."""
        frames = self.frames(problem, objective=objective, **asked)
        each = schedules(frames, problem)
        assert [check(problem, schedule) for schedule in each] == [[]] * len(each)
        values = [length(schedule, objective) for schedule in each]
        return values, max([trivial_bound(problem, objective), *bounds(frames)])


@contextmanager
def solver_process() -> Iterator[Solver]:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        yield Solver(process)
        process.kill()
