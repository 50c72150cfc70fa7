"""Programs as lists of op texts: one line a device with its ops between spaces, or JSON, a list of texts a device."""

from __future__ import annotations

import re

from optpipe.errors import InputError
from optpipe.model.problem import Problem, parse_json
from optpipe.model.program import Program
from optpipe.schedule import Schedule


def read(text: str, problem: Problem, what: str) -> Schedule:
    """The schedule of these programs. Raises InputError that names the line, or the entry, and what would be right."""
    lists = _from_json(text, what) if text.lstrip().startswith("[") else _from_lines(text)
    if len(lists) != len(problem.devices):
        raise InputError(
            f"{what}: {len(lists)} programs, the problem has {len(problem.devices)} devices: one is expected for each"
        )
    programs = []
    for n, texts in enumerate(lists, 1):
        try:
            programs.append(Program.parse(texts))
        except InputError as error:
            raise InputError(f"{what}, program {n}: {error}") from None
    return Schedule(problem, tuple(programs))


def _from_lines(text: str) -> list[list[str]]:
    return [[word for word in re.split(r"[\s,]+", line) if word] for line in text.rstrip().splitlines()]


def _from_json(text: str, what: str) -> list[list[str]]:
    lists = parse_json(text, what)
    for n, texts in enumerate(lists, 1):
        if not (isinstance(texts, list) and all(isinstance(op, str) for op in texts)):
            raise InputError(f"{what}, program {n}: a list of op texts is expected, such as ['0F0', '0BW0']")
    return list(lists)
