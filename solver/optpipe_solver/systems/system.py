"""`System`: a published schedule, and the stages that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optpipe.child import Placements
from optpipe.errors import InputError
from optpipe.placement import Placement, Shape
from optpipe.problem import Problem
from optpipe.schedule import Schedule


@dataclass(frozen=True)
class System:
    """`build` makes the schedule of a problem whose stages are as is said here, and raises `InputError` for what else the paper excludes.

    It runs on `least` to `most` (None: any number) stages a device in this shape; where it may choose it takes `chunks`.
    """

    name: str
    source: str  # paper and section
    build: Callable[..., Schedule]
    least: int = 1
    most: int | None = 1
    chunks: int = 1
    shape: Shape = "looped"
    parameters: tuple[str, ...] = ()  # keywords of `build`, whole numbers

    def placement(self, problem: Problem, placements: Placements) -> Placement | None:
        """How the problem's work becomes stages for this system; None where its own stages are."""
        if self._runs_on(problem):
            return None
        if placements == "keep":
            raise InputError(f"{self.name} needs {self._stages()}: the problem has other stages (with all placements it is given them)")
        return Placement.balanced(problem, self.chunks, self.shape)

    def _runs_on(self, problem: Problem) -> bool:
        route, devices = problem.all_routes[0], len({stage.device for stage in problem.stages})
        if len(problem.all_routes) > 1 or route != tuple(range(len(route))) or len(route) % devices:
            return False
        chunks = len(route) // devices
        own = [stage.device for stage in problem.stages]
        right = chunks >= self.least and (self.most is None or chunks <= self.most)
        return right and own == Placement(chunks=chunks, shape=self.shape if chunks > 1 else "looped").order(problem)

    def _stages(self) -> str:
        shape = {"looped": "looped", "v": "V-shaped"}[self.shape]
        if self.most == 1:
            return "one stage a device, all in one row"
        many = (
            f"{self.least}" if self.least == self.most else f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
        )
        return f"{many} {shape} stages a device"
