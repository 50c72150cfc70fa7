"""A text that every machine has: the source code of the Python standard library, as one text or as documents of very
different lengths."""

from __future__ import annotations

import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ENOUGH = 4_000_000  # bytes


def corpus() -> Tensor:
    """A few million bytes of source code, in the order of the files' names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(library.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= ENOUGH:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def batch(text: Tensor, step: int, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on every rank: (sequences, context) bytes, and the byte that follows each, as
    int64."""
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(0, len(text) - context - 1, (sequences,), generator=generator)
    rows = torch.stack([text[begin : begin + context + 1] for begin in begins.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Microbatch(NamedTuple):
    """Documents in one row, without padding.

    Attributes
    ----------
    inputs, targets
        (1, t) bytes, and the byte that follows each in its document, as int64.
    lengths
        (d,) of the documents, which sum to t; None: every row is one document.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None


def documents(text: Tensor, longest: int) -> list[Tensor]:
    """The text cut at its empty lines. A document has `longest` bytes and the one that follows, or fewer, down to a
    few."""
    ends = (1 + torch.nonzero((text[:-1] == 10) & (text[1:] == 10)).flatten()).tolist()
    return [text[a:b][: longest + 1] for a, b in pairwise([0, *ends, len(text)]) if b - a > 2]


def packed(documents: list[Tensor], step: int, microbatches: int, each: int) -> list[Microbatch]:
    """The micro-batches of a step, the same on every rank, with so many documents in each."""
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(0, len(documents), (microbatches, each), generator=generator).tolist()
    rows = [[documents[n].long() for n in numbers] for numbers in chosen]
    return [
        Microbatch(
            torch.cat([document[:-1] for document in row])[None],
            torch.cat([document[1:] for document in row])[None],
            torch.tensor([len(document) - 1 for document in row]),
        )
        for row in rows
    ]
