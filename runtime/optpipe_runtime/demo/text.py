"""A text that every machine has: the source code of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

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
