"""`System`: a published schedule and the stages that it runs on; and how orders of ops become schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import count, pairwise
from typing import TypeVar

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats, Table
from optpipe.model.ops import Op, Pair
from optpipe.model.placement import MOST_CHUNKS, NAMES, WAYS, Placement, Shape
from optpipe.model.problem import Problem
from optpipe.model.program import Program
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
        if self.shape == "bidirectional" and not isinstance(problem.overlap_factor, float):  # as where all are searched
            is_given = (
                "missing" if problem.overlap_factor is None else "by pair, as of an estimate with parameters once"
            )
            raise InputError(
                f"overlap_factor is {is_given}: on stages not given both ways, {self.name} holds all parameters "
                "twice to run forwards beside backwards; dualpipe-v holds them once"
            )
        try:
            return Placement.balanced(problem, self.chunks, self.shape)
        except InputError:  # fewer layers than stages
            if chunks:
                return None
            raise

    def _own_chunks(self, problem: Problem) -> int | None:
        """Count the stages of a device, each way; None if devices and routes have another shape."""
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


def in_order(problem: Problem, lists: Sequence[Iterable[Op | Pair]]) -> Schedule:
    """Make a schedule without transfers from the ops of each device, in order."""
    return Schedule(problem, tuple(Program.from_items(ops) for ops in lists))


def by_slot(problem: Problem, table: Table, slot: Floats) -> Schedule:
    """Make a schedule without transfers from rows of a program's table and the slot of each.

    Of two ops in one slot the one whose row comes first runs first.
    """
    return Schedule.in_order(problem, table[np.argsort(slot, kind="stable")])


def warmed_up(forwards: Sequence[Op], backwards: Sequence[Sequence[Op]], warm_up: int) -> list[Op]:
    """Order ops in the phases of 1F1B: `warm_up` forwards, then one forward, one backward, then the backwards left.

    A backward may be B and W.
    """
    ops = list(forwards[:warm_up])
    for k, backward in enumerate(backwards):
        ops += [*forwards[warm_up + k : warm_up + k + 1], *backward]
    return ops


def even_groups(m: int, size: int) -> list[range]:
    """Divide m micro-batches into as many groups of at least `size` as possible, as even as can be, larger ones first.

    If there are fewer than `size` they are one group.
    """
    groups = max(1, m // size)
    ends = [k * (m // groups) + min(k, m % groups) for k in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def distinct_slots(first: int, chunks: int, apart: int) -> list[int]:
    """Return the slots of a device's chunks, each at least `apart` after the one before, no two the same modulo their
    number, so that chunks do not collide when all is repeated.

    Chunks wait gcd(apart, chunks) - 1 times in all; no other choice holds less.
    """
    slots = [first]
    while len(slots) < chunks:
        taken = {slot % chunks for slot in slots}
        slots.append(next(slot for slot in count(slots[-1] + apart) if slot % chunks not in taken))
    return slots


def recomputed_stages(problem: Problem, chunks: int, level: int, method: str) -> range:
    """Return the stages of as many chunks, the shallowest of each device.

    Raises InputError if devices have fewer, or one of them cannot be recomputed, or has no level of this number.
    """
    if chunks not in range(1, count_chunks(problem) + 1):
        raise InputError(f"recomputed = {chunks}: expected 1 to {count_chunks(problem)}, the chunks of a device")
    stages = range(chunks * count_devices(problem))
    why = f"{method} recomputes stages 0 to {stages[-1]}"
    for s in stages:
        if not problem.stages[s].can_recompute:
            raise InputError(f"stages[{s}].recompute_ms is missing: {why}")
        if not 0 <= level < (levels := len(problem.stages[s].all_levels)):
            raise InputError(f"level = {level}: stages[{s}] has {levels}, numbered from 0")
    return stages


def count_devices(problem: Problem) -> int:
    """How many devices run any stage."""
    return len({stage.device for stage in problem.stages})


def count_chunks(problem: Problem) -> int:
    """How many stages each of these devices runs."""
    return len(problem.stages) // count_devices(problem)
