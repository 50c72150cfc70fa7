"""`System`: a published schedule, and the stages that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TypeVar

from optpipe.errors import InputError
from optpipe.model.placement import MOST_CHUNKS, NAMES, WAYS, Placement, Shape
from optpipe.model.problem import Problem
from optpipe.options import Placements
from optpipe.schedule import Schedule

Build = TypeVar("Build", bound=Callable[..., Schedule])
PUBLISHED: dict[str, System] = {}  # by name


@dataclass(frozen=True)
class System:
    """A published schedule.

    Attributes
    ----------
    source
        Paper and section.
    build
        Makes the schedule of a problem with the stages described here. Raises InputError for what else the paper
        excludes.
    least, most
        The numbers of stages a device on which it runs; None for any.
    chunks
        The number of stages a device that it takes where it may choose.
    shape
        How a micro-batch passes the stages.
    parameters
        Keywords of `build`, whole numbers.
    """

    name: str
    source: str
    build: Callable[..., Schedule]
    least: int = 1
    most: int | None = 1
    chunks: int = 1
    shape: Shape = "looped"
    parameters: tuple[str, ...] = ()

    def placement(self, problem: Problem, placements: Placements) -> Placement | None:
        """Choose how the problem's work becomes stages for this system.

        None if it runs on the problem's own stages, unless these are fewer than it would take and it may choose.
        """
        chunks = self._own_chunks(problem)
        if chunks and (placements == "keep" or chunks >= self.chunks):
            return None
        if placements == "keep":
            hint = " (with all placements it is given them)" if len(problem.all_routes) == 1 else ""
            raise InputError(f"{self.name} needs {self._stages()}: the problem has other stages{hint}")
        if self.shape == "bidirectional" and problem.overlap_factor is None:  # as in the placement search
            raise InputError(
                f"overlap_factor is missing: on stages not given both ways, {self.name} holds all parameters "
                "twice to run forwards beside backwards"
            )
        try:
            return Placement.balanced(problem, self.chunks, self.shape)
        except InputError:  # fewer layers than stages
            if chunks:
                return None
            raise

    def _own_chunks(self, problem: Problem) -> int | None:
        """Count the stages of a device, each way, if devices and routes have this shape; None if they do not.

        Which micro-batch takes which route is free.
        """
        devices, ways = [stage.device for stage in problem.stages], WAYS[self.shape]
        length, chunks = len(devices) // ways, len(devices) // ways // len(set(devices))
        rows = tuple(tuple(range(w * length, (w + 1) * length)) for w in range(ways))
        if problem.all_routes != rows or not self.least <= chunks <= (self.most or MOST_CHUNKS):
            return None
        return chunks if devices == Placement(chunks=chunks, shape=self.shape).along(devices[:length]) else None

    def _stages(self) -> str:
        if self.shape == "bidirectional":
            return "one stage a device each way, on two routes (bidirectional)"
        if self.most == 1:
            return "one stage a device, all in one row"
        upto = " or more" if self.most is None else f" to {self.most}" if self.most > self.least else ""
        return f"{self.least}{upto} {NAMES[self.shape]} stages a device"


def published(
    name: str, source: str, *, least: int = 1, most: int | None = 1, chunks: int = 1, shape: Shape = "looped"
) -> Callable[[Build], Build]:
    """Make a function from a problem to a schedule a `System`; its other arguments are the parameters."""

    def register(build: Build) -> Build:
        parameters = tuple(signature(build).parameters)[1:]
        PUBLISHED[name] = System(name, source, build, least, most, chunks, shape, parameters)
        return build

    return register
