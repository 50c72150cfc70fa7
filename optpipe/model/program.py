"""`Program`: the ordered list of one device's ops, stored as an array so that 200,000 ops are cheap to pass around."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.errors import InputError
from optpipe.model.ops import HOST_LINK, OP, Kind, Op, Pair, parse_item

KIND, STAGE, MICROBATCH, PART, JOINED = range(5)  # the columns of a program's table

# Ops that are parsed in one go. While a regular expression runs, no other thread does: some ms for so many.
AT_ONCE = 2000

_LIST = re.compile(rf"(?:{OP.pattern})(?:[+ ](?:{OP.pattern}))*")
_PIECE = re.compile(rf"{OP.pattern}(\+?)")
_CODE = {kind.name: int(kind) for kind in Kind}
_NAME = [kind.name for kind in Kind]


@cache
def marks_of(*kinds: Kind) -> NDArray[np.bool_]:
    """(number of kinds,) true at these kinds: read at a row's KIND."""
    return np.array([kind in kinds for kind in Kind])


def of_kinds(table: NDArray[np.int32], *kinds: Kind) -> NDArray[np.bool_]:
    """Marks the rows of these kinds."""
    marks: NDArray[np.bool_] = marks_of(*kinds)[table[:, KIND]]
    return marks


class Program:
    """An immutable list of ops and pairs.

    Parameters
    ----------
    table
        (n, 5) int32, one row an op: kind, stage, micro-batch, part, and 1 where the op makes a pair with the next row.
    """

    __slots__ = ("table",)

    def __init__(self, table: NDArray[np.int32]) -> None:
        table = np.ascontiguousarray(table, dtype=np.int32).reshape(-1, 5)
        table.flags.writeable = False
        self.table = table

    @classmethod
    def from_items(cls, items: Iterable[Op | Pair]) -> Program:
        """The program of these ops and pairs, in their order."""
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
        """Reads op texts such as `0F3`, `0O3.1` and `0F3+4BW1`. Raises InputError that quotes the wrong entry.

        `B` is the input gradient and `BW` the full backward (PyTorch calls them `I` and `B`).
        """
        texts, tables = list(texts), [np.zeros((0, 5), dtype=np.int32)]
        for begin in range(0, len(texts), AT_ONCE):
            table = _table(texts[begin : begin + AT_ONCE])
            if table is None:
                return cls.from_items(parse_item(text) for text in texts)  # slower, but it finds the wrong entry
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
        """Every op; those of a pair one after the other."""
        return [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in self.table.tolist()]

    def text(self) -> str:
        """All ops and pairs, separated by spaces."""
        return "".join(
            f"{stage}{_NAME[kind]}{microbatch}{f'.{part}' if part else ''}{'+' if joined else ' '}"
            for kind, stage, microbatch, part, joined in self.table.tolist()
        ).rstrip()

    def texts(self) -> list[str]:
        """One text an op or pair; `Program.parse` reads them back."""
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
    """The rows of these texts; None if one of them is neither an op nor a pair."""
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
    """Reads one program from each list of op texts. Raises InputError that says which of them, of those called `what`,
    is wrong."""
    programs = []
    for d, texts in enumerate(entries):
        try:
            programs.append(Program.parse(texts))
        except InputError as error:
            raise InputError(f"{what}[{d}]: {error}") from None
    return tuple(programs)


def link_orders(
    shared_links: Mapping[str, tuple[int, ...]], table: NDArray[np.int32], device: NDArray[np.int64]
) -> dict[str, Program]:
    """By shared link with any: its transfers among the rows of a table (n, 5), each of a device (n,), in their
    order."""
    transfer = of_kinds(table, *HOST_LINK)
    links = {link: Program(table[transfer & np.isin(device, sharers)]) for link, sharers in shared_links.items()}
    return {link: order for link, order in links.items() if len(order)}
