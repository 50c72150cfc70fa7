"""What a search emits, by kind of frame."""

from collections.abc import Iterable
from typing import Any

from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Incumbent, Note
from optpipe.schedule import Schedule


def schedules(frames: Iterable[Any], problem: Problem) -> list[Schedule]:
    return [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]


def bounds(frames: Iterable[Any]) -> list[float]:
    return [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]


def notes(frames: Iterable[Any]) -> list[str]:
    """The texts of notes, but for reports of searches that go on."""
    return [frame.text for frame in frames if isinstance(frame, Note) and not frame.ongoing]
