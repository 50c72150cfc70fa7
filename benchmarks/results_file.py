"""What a long benchmark has measured, in a file of JSON lines: a run that stopped goes on where it was, and a table is
printed again without its searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from optpipe.errors import InputError
from optpipe.files import read_file
from optpipe.options import Placements, SearchOptions, SolveOptions
from optpipe_cli.options import require_writable

ResultsPath = Annotated[
    Path | None,
    Parameter(
        validator=require_writable, help="A file of JSON lines: what is there is not measured again, the rest is added."
    ),
]


class KeepOptions(SolveOptions):
    """As the results were measured: on the stages as given, if nothing else is asked for."""

    placements: Placements | None = "keep"


class Results:
    """The rows of a benchmark, told apart by `keys`. The file's first line says what was asked for.

    Raises InputError if the file cannot be read or written, if another benchmark has written it, or if other options
    were given when it was written.
    """

    def __init__(
        self, path: Path | None, name: str, keys: tuple[str, ...], options: SearchOptions, **further_options: Any
    ) -> None:
        self._path, self._keys = path, keys
        self._asked = {"bench": name, **options.model_dump(mode="json"), **further_options}
        lines = read_file(path).splitlines() if path and path.exists() else []
        self._has_first_line = bool(lines)
        self.rows: list[dict[str, Any]] = []
        try:
            before, *self.rows = map(json.loads, lines) if lines else (self._asked,)
            self._by_key = {self._key(row): row for row in self.rows}
            same_benchmark = before["bench"] == name
        except (ValueError, KeyError, TypeError):
            same_benchmark = False
        if not same_benchmark:
            raise InputError(f"{path}: not what `python -m benchmarks {name}` writes")
        if differing := [option for option, value in before.items() if self._asked.get(option) != value]:
            was, now = (", ".join(f"{o} = {asked.get(o)}" for o in differing) for asked in (before, self._asked))
            raise InputError(f"{path}: measured with {was}; expected {now}, as asked for now")

    def find(self, *key: object) -> dict[str, Any] | None:
        """The row of the file with these values of its keys."""
        return self._by_key.get(key) if self._path else None

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, and write it at once."""
        if self._path:
            lines = [row] if self._has_first_line else [self._asked, row]
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
            self._has_first_line = True
        self.rows.append(row)
        self._by_key[self._key(row)] = row
        return row

    def _key(self, row: dict[str, Any]) -> tuple[object, ...]:
        return tuple(row[name] for name in self._keys)
