"""What one GPU does in F of a piece: matmuls, passes over memory, and what it sends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple


class Matmul(NamedTuple):
    """`copies` matmuls in one kernel, each of a matrix of `rows` × `depth` and one of `depth` × `columns`."""

    rows: float
    columns: float
    depth: float
    copies: float = 1

    @property
    def operations(self) -> float:
        return 2 * self.copies * self.rows * self.columns * self.depth

    @property
    def numbers(self) -> float:
        """Of both matrices and of what comes out."""
        return self.copies * (self.rows * self.depth + self.depth * self.columns + self.rows * self.columns)

    @property
    def input_gradient(self) -> Matmul:
        return Matmul(self.rows, self.depth, self.columns, self.copies)

    @property
    def weight_gradient(self) -> Matmul:
        return Matmul(self.depth, self.columns, self.rows, self.copies)


class Collective(NamedTuple):
    """What a GPU sends to the other GPUs that work on the same stage, along one dimension of parallelism."""

    over: Literal["tensor", "context", "experts"]
    bytes: float
    steps: int  # one after the other


@dataclass(frozen=True)
class Work:
    """What F of a piece does on one GPU.

    `matmuls` are those with weights, `scores` the operations of attention's: of one kernel of flash attention, or of
    the two `products` of unfused attention. `traffic` are the bytes that `passes` kernels such as norms and activation
    functions read and write, `again` the part of them that the backward repeats if they are recomputed.
    """

    matmuls: tuple[Matmul, ...] = ()
    scores: float = 0.0
    products: tuple[Matmul, ...] = ()
    traffic: float = 0.0
    again: float = 0.0
    passes: int = 0
    sent: tuple[Collective, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    @property
    def matmul(self) -> float:
        """Operations of the matmuls with weights."""
        return sum(each.operations for each in self.matmuls)
