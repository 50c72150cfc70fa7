"""What a long bench has measured, in a file of JSON lines: a run that stopped goes on where it was, and a table is
printed again without its searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.errors import InputError
from optpipe_cli.output import require_writable

if TYPE_CHECKING:
    from optpipe.options import SearchOptions

ResultsFile = Annotated[
    Path | None, typer.Option(help="A file of JSON lines: what is there is not measured again, the rest is added.")
]


class Results:
    """The rows of a bench, told apart by `keys`. The file's first line says what was asked for.

    Raises InputError if the file cannot be read or written, if it has not what this command writes, or if other options
    were given when it was written.
    """

    def __init__(
        self, path: Path | None, command: str, keys: tuple[str, ...], options: SearchOptions, **more: Any
    ) -> None:
        from optpipe.model.problem import read_file

        require_writable(path)
        self._path, self._keys = path, keys
        self._asked = {"bench": command, **options.model_dump(mode="json"), **more}
        lines = read_file(path).splitlines() if path and path.exists() else []
        self._begun = bool(lines)
        self.rows: list[dict[str, Any]] = []
        try:
            before, *self.rows = map(json.loads, lines) if lines else (self._asked,)
            self._known = {self._key(row): row for row in self.rows}
            mine = before["bench"] == command
        except (ValueError, KeyError, TypeError):
            mine = False
        if not mine:
            raise InputError(f"{path}: not what `optpipe bench {command}` writes")
        if other := [name for name, value in before.items() if self._asked.get(name) != value]:
            was, now = (", ".join(f"{name} = {of.get(name)}" for name in other) for of in (before, self._asked))
            raise InputError(f"{path}: measured with {was}; expected {now}, as asked for now")

    def find(self, *key: object) -> dict[str, Any] | None:
        """The row of the file with these values of its keys."""
        return self._known.get(key) if self._path else None

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, and write it at once."""
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in ([] if self._begun else [self._asked]) + [row])
            self._begun = True
        self.rows.append(row)
        self._known[self._key(row)] = row
        return row

    def _key(self, row: dict[str, Any]) -> tuple[object, ...]:
        return tuple(row[name] for name in self._keys)
