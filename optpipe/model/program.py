"""`Program`: one device's ordered list of ops, kept as an array so that 200,000 of them are cheap to pass around."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import InputError
from optpipe.model.ops import OP, Kind, Op, Pair, parse_item

KIND, STAGE, MICROBATCH, PART, JOINED = range(5)

AT_ONCE = (
    2000  # ops; the regular expressions let no other thread run meanwhile, which in a service is some ms for so many
)

_LIST = re.compile(rf"(?:{OP.pattern})(?:[+ ](?:{OP.pattern}))*")
_PIECE = re.compile(rf"{OP.pattern}(\+?)")
_CODE = {kind.name: int(kind) for kind in Kind}
_NAME = [kind.name for kind in Kind]


@cache
def _lookup(*kinds: Kind) -> NDArray[np.bool_]:
    return np.array([kind in kinds for kind in Kind])


def of_kinds(table: NDArray[np.int32], *kinds: Kind) -> NDArray[np.bool_]:
    """Marks the rows of these kinds."""
    marks: NDArray[np.bool_] = _lookup(*kinds)[table[:, KIND]]
    return marks


class Program:
    """An immutable list of ops and pairs. `table` has a row an op: kind, stage, micro-batch, part, and whether the next
    row joins it."""

    __slots__ = ("table",)

    def __init__(self, table: NDArray[np.int32]) -> None:
        table = np.ascontiguousarray(table, dtype=np.int32).reshape(-1, 5)
        table.flags.writeable = False
        self.table = table

    @classmethod
    def of(cls, items: Iterable[Op | Pair]) -> Program:
        rows: list[tuple[int, int, int, int, int]] = []
        for item in items:
            if isinstance(item, Pair):
                rows.append((*item.first, 1))
                rows.append((*item.second, 0))
            else:
                rows.append((*item, 0))
        return cls(np.array(rows, dtype=np.int32).reshape(-1, 5))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Program:
        """Reads a list of `0F3`, `0O3.1`, `0F3+4BW1`; raises `InputError` naming the entry."""
        texts, tables = list(texts), [np.zeros((0, 5), dtype=np.int32)]
        for begin in range(0, len(texts), AT_ONCE):
            table = _table(texts[begin : begin + AT_ONCE])
            if table is None:
                return cls.of(parse_item(text) for text in texts)  # the slow way finds the culprit
            tables.append(table)
        return cls(np.concatenate(tables))

    def __iter__(self) -> Iterator[Op | Pair]:
        rows = iter(self.table.tolist())
        for kind, stage, microbatch, part, joined in rows:
            op = Op(Kind(kind), stage, microbatch, part)
            if joined:
                kind, stage, microbatch, part, _ = next(rows)
                yield Pair(op, Op(Kind(kind), stage, microbatch, part))
            else:
                yield op

    def ops(self) -> list[Op]:
        """Every op, those of pairs one after the other."""
        return [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in self.table.tolist()]

    def text(self) -> str:
        """All ops and pairs, a space between them."""
        return "".join(
            f"{stage}{_NAME[kind]}{microbatch}{f'.{part}' if part else ''}{'+' if joined else ' '}"
            for kind, stage, microbatch, part, joined in self.table.tolist()
        ).rstrip()

    def texts(self) -> list[str]:
        """The list as text; `Program.parse` reads it back."""
        return self.text().split()

    def __len__(self) -> int:
        """The number of ops."""
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.table.tobytes())

    def __repr__(self) -> str:
        return f"Program.parse({self.texts()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.table,)


def _table(texts: list[str]) -> NDArray[np.int32] | None:
    """Some rows of a program's table; None where a text is neither an op nor a pair."""
    whole = " ".join(texts)
    if _LIST.fullmatch(whole) is None or whole.count(" ") != len(texts) - 1:
        return None
    rows = [
        (_CODE[name or parted], int(stage), int(j or k), int(part or 0), plus == "+")
        for stage, name, j, parted, k, part, plus in _PIECE.findall(whole)
    ]
    table = np.array(rows, dtype=np.int32)
    joined = table[:, JOINED]
    return None if (joined[1:] & joined[:-1]).any() else table


def parse_programs(entries: Any, what: str) -> tuple[Program, ...]:
    """Programs from lists of texts, with an `InputError` that says which one is wrong."""
    programs = []
    for d, texts in enumerate(entries):
        try:
            programs.append(Program.parse(texts))
        except InputError as error:
            raise InputError(f"{what}[{d}]: {error}") from None
    return tuple(programs)
