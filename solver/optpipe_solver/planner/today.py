"""What runs today, such as `tp 8, pp 4, 1f1b`: where a plan starts, and what it is compared with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe.text import distinct_sizes
from optpipe.transformer.work import LEVELS
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.systems import SYSTEMS, generate

DEGREES = ("tp", "pp", "dp", "cp", "ep", "chunks", "sequences")  # sequences of one micro-batch
_PART = re.compile(rf"({'|'.join(DEGREES)})[ =]*([1-9][0-9]{{0,5}})")


@dataclass(frozen=True)
class Today:
    """A division as far as it is given, and the published schedule that runs on it."""

    text: str
    degrees: Mapping[str, int]
    method: str = "1f1b"
    recompute: str = "none"

    @classmethod
    def read(cls, text: str) -> Today:
        """Read parts with commas between. Raises InputError for one that is none of them."""
        degrees: dict[str, int] = {}
        method, recompute = "1f1b", "none"
        for part in (part.strip().lower() for part in text.split(",")):
            if found := _PART.fullmatch(part):
                degrees[found[1]] = int(found[2])
            elif part in SYSTEMS:
                method = part
            elif part.startswith("recompute ") and part.split()[-1] in LEVELS:
                recompute = part.split()[-1]
            else:
                raise InputError(
                    f"today = {text!r}: {part!r} is neither a number of {', '.join(DEGREES)} such as pp 4, nor a "
                    f"published schedule such as 1f1b, nor recompute {', '.join(LEVELS)}"
                )
        return cls(text, degrees, method, recompute)

    def is_one(self, candidate: Candidate) -> bool:
        """Whether a candidate is divided so; what is not given is free, but for chunks and layers."""
        parallelism, run = candidate.estimate.parallelism, candidate.estimate.run
        has = {"sequences": run.microbatch_size, **parallelism.model_dump(include=set(DEGREES))}
        asked = dict(self.degrees)
        if self.method == "1f1b":
            asked.setdefault("chunks", 1)
        even = not parallelism.layers and parallelism.zero <= 1
        return even and run.recompute == self.recompute and all(has[name] == degree for name, degree in asked.items())


@dataclass(frozen=True)
class Running:
    """What runs today by the cost model: its iteration in ms, and what its fullest GPU needs in bytes."""

    candidate: Candidate
    schedule: Schedule
    used_bytes: int

    @property
    def iteration_ms(self) -> float:
        return self.candidate.with_step_end(self.schedule.makespan_ms)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.candidate.estimate.gpu.memory_bytes


def running(today: Today, candidates: Sequence[Candidate]) -> Running:
    """The shortest iteration of what today can mean, if any fits the memory, else the one that needs least of it.

    Raises InputError if no candidate is divided so, or none has room for an activation and this schedule.
    """
    divided = [candidate for candidate in candidates if today.is_one(candidate)]
    if not divided:
        raise InputError(f"today = {today.text!r}: these GPUs, this batch and this model cannot be divided so")
    every = list(_every(today, divided))
    if not every:
        raise InputError(f"today = {today.text!r}: {_why_none(today, divided)}")
    fitting = [each for each in every if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.iteration_ms)
    return min(every, key=lambda each: each.used_bytes)


def _why_none(today: Today, divided: Sequence[Candidate]) -> str:
    least = min(divided, key=lambda candidate: candidate.state_bytes)
    has = least.estimate.gpu.memory_bytes
    if least.state_bytes < has:
        return f"{today.method} is not a schedule of {least}"
    held, whole = distinct_sizes(least.state_bytes, has)
    return f"with {least}, a GPU holds {held} without any activation, margin included, and has {whole}"


def _every(today: Today, candidates: Sequence[Candidate]) -> Iterator[Running]:
    for candidate in candidates:
        try:
            if SYSTEMS[today.method].placement(candidate.problem, "keep") is None:
                schedule = generate(today.method, candidate.problem)
                yield Running(candidate, schedule, max(candidate.used_bytes(schedule)))
        except OptPipeError:  # no room for any activation, or not a schedule of these stages
            continue
