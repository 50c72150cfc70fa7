"""Programs as lists of op texts: one line a device with its ops between spaces, or JSON, a list of texts a device."""

from __future__ import annotations

import re
from collections.abc import Iterable

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem, parse_json
from optpipe.model.program import Program
from optpipe.schedule import Schedule

_TORCHS = re.compile(r"^\d+(I\d|SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD)|OVERLAP_F_B$")


def read(text: str, problem: Problem, what: str) -> Schedule:
    """The schedule of these programs. Raises InputError that names the line, or the entry, and what would be right."""
    lists = _from_json(text, what) if text.lstrip().startswith("[") else _from_lines(text)
    if len(lists) != len(problem.devices):
        raise InputError(
            f"{what}: {len(lists)} programs, the problem has {len(problem.devices)} devices: one is expected for each"
        )
    programs = []
    for n, texts in enumerate(lists, 1):
        if torchs := [text for text in texts if _TORCHS.search(text)]:
            raise InputError(
                f"{what}, program {n}: {torchs[0][:40]!r} is an action of PyTorch: its rows are read from a file named "
                ".csv"
            )
        try:
            programs.append(Program.parse(texts))
        except InputError as error:
            raise InputError(f"{what}, program {n}: {error}") from None
    _require_weights(programs, what)
    return Schedule(problem, tuple(programs))


def _require_weights(programs: Iterable[Program], what: str) -> None:
    """Raises InputError if B is meant as the whole backward: no program has a W."""
    ops = [op for program in programs for op in program.ops()]
    inputs = next((op for op in ops if op.kind is Kind.B), None)
    if inputs and not any(op.kind is Kind.W for op in ops):
        raise InputError(
            f"{what}: {inputs} and no W: B is the gradient of the inputs only; write {inputs._replace(kind=Kind.BW)} "
            "for the whole backward"
        )


def _from_lines(text: str) -> list[list[str]]:
    return [[word for word in re.split(r"[\s,]+", line) if word] for line in text.rstrip().splitlines()]


def _from_json(text: str, what: str) -> list[list[str]]:
    lists = parse_json(text, what)
    for n, texts in enumerate(lists, 1):
        if not (isinstance(texts, list) and all(isinstance(op, str) for op in texts)):
            raise InputError(f"{what}, program {n}: a list of op texts is expected, such as ['0F0', '0BW0']")
    return list(lists)
