"""Tasks that show a stored schedule: as a picture, as a trace, in the form of another program."""

from __future__ import annotations

import json
from typing import NamedTuple

from optpipe.formats import Export, export
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.schedule import Schedule
from optpipe.show.figure import figure
from optpipe.show.trace import trace


class Stored(NamedTuple):
    """A schedule as the database has it: problem and `Programs` as JSON, and the method."""

    problem: str
    programs: str
    method: str

    def read(self) -> Schedule:
        return Programs.model_validate_json(self.programs).schedule(Problem.from_json(self.problem), self.method)


def drawn(stored: Stored, before: Stored | None, bound_ms: float | None) -> str:
    content = figure(stored.read(), before.read() if before else None, bound_ms)
    return json.dumps(content, separators=(",", ":"))


def traced(stored: Stored) -> str:
    return trace(stored.read())


def exported(stored: Stored, to: str, without_offload: bool) -> Export:
    return export(stored.read(), to, without_offload)
