"""Schedules read from text, as from a file."""

import tempfile
from pathlib import Path

from optpipe import Problem, Schedule, import_schedule


def imported(text: str, problem: Problem, name: str = "rows.csv") -> Schedule:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        return import_schedule(path, problem)
