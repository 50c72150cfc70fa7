"""`Entry`: a solved schedule as it is stored."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import ValidationError

from optpipe.errors import InputError, input_error
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.process.protocol import Programs
from optpipe.schedule import Found, Schedule, check

log = logging.getLogger("optpipe.cache")


class Entry(Record):
    """A solved schedule as it is stored and exported: a line of JSON of the format `optpipe.cache/1`."""

    format: Literal["optpipe.cache/1"] = "optpipe.cache/1"
    problem: Problem
    objective: Objective
    objective_ms: TotalMs
    status: Found
    lower_bound_ms: TotalMs | None = None  # not exported
    method: str
    programs: Programs

    @property
    def ops(self) -> int:
        return sum(len(text.split()) for text in self.programs.programs)

    def schedule(self, problem: Problem | None = None) -> Schedule:
        """Return its schedule, for `problem` if one is given. Raises `InputError` if an op cannot be read."""
        return self.programs.schedule(problem or self.problem, self.method)

    def beats(self, length: float, bound: float | None) -> bool:
        """Return whether it is shorter than a schedule of this length, or as short with a better bound, in ms."""
        return (self.objective_ms, -(self.lower_bound_ms or 0.0)) < (length, -(bound or 0.0))

    def valid_schedule(self, problem: Problem) -> Schedule | None:
        """Return its schedule for this problem; None if it is not valid."""
        try:
            schedule = self.schedule(problem)
        except InputError:
            return None
        return None if check(problem, schedule) else schedule

    def exported(self) -> str:
        """Return it as a line of JSON without what only this cache has proven."""
        return self.model_copy(update={"status": "feasible", "lower_bound_ms": None}).model_dump_json(exclude_none=True)


def read_entry(text: str | None) -> Entry | None:
    """Return the entry in a stored text; None if it is damaged, which is logged."""
    try:
        return Entry.model_validate_json(text) if text is not None else None
    except ValidationError as error:
        log.warning("skipped an entry that cannot be read: %s", input_error(error, "entry"))
        return None
