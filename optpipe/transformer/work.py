"""A piece of a transformer on one GPU: its weights, what it saves, and what F does: matmuls, passes, messages. `Share`
is what of a micro-batch the GPU works on.

Letters as in the papers: b sequences of s tokens a micro-batch, hidden size h, a heads, t-way tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil, floor, prod
from typing import Literal, NamedTuple

from optpipe.transformer.records import Parallelism, Precision, Recompute, Run, Transformer

FP32, MASK = 4, 1  # bytes
NORM, RESIDUAL = 2, 3  # tensors of the width of the model that are read and written
# What the kernels of a scan take over their operations and bytes at the speeds of attention and memory: learned from
# given rows of Nemotron 3 Nano on five GPUs (docs/costs.md).
SCAN_SLOWER = 3
OPERAND_BYTES: dict[Precision, float] = {"bf16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5, "fp32": 4}
LEVELS: tuple[Recompute, ...] = ("none", "selective", "cheap", "full")  # each computes again what those before it do


class Matmul(NamedTuple):
    """`copies` matmuls in one kernel, each of a matrix of `rows` × `depth` and one of `depth` × `columns`.

    `wide` ones have 16 bits where others have fewer; the weights of `frozen` ones are not trained; `unaligned` ones
    have a width that is no multiple of 8.
    """

    rows: float
    columns: float
    depth: float
    copies: float = 1
    wide: bool = False
    frozen: bool = False
    unaligned: bool = False

    @property
    def operations(self) -> float:
        return 2 * self.copies * self.rows * self.columns * self.depth

    @property
    def operands(self) -> float:
        """Numbers of both matrices."""
        return self.copies * (self.rows * self.depth + self.depth * self.columns)

    @property
    def outputs(self) -> float:
        """Numbers of what comes out."""
        return self.copies * self.rows * self.columns

    @property
    def input_gradient(self) -> Matmul:
        return self._replace(columns=self.depth, depth=self.columns)

    @property
    def weight_gradient(self) -> Matmul:
        return self._replace(rows=self.depth, depth=self.rows)


class Routing(NamedTuple):
    """Each token goes to `copies` of `experts`, of `chosen` of their `groups` as many each (DeepSeek-V3, 2.1.2)."""

    experts: int
    copies: int
    groups: int
    chosen: int

    def reached(self, parts: float) -> float:
        """The share of so many equal parts of all experts in which a token has at least one."""
        if parts <= self.groups:
            return _hit(parts, self.groups, self.chosen)
        inside = _hit(parts / self.groups, self.experts / self.groups, self.copies / self.chosen)
        return self.chosen / self.groups * inside


def _hit(parts: float, of: float, chosen: float) -> float:
    """The probability that one of `parts` of `of` has some of those that are chosen, none of them twice; of a number
    chosen that is not whole the mean of both beside it."""
    fewer, more = (
        prod(max(0.0, 1 - of / parts / (of - i)) for i in range(number)) for number in (floor(chosen), ceil(chosen))
    )
    return 1 - fewer - (chosen - floor(chosen)) * (more - fewer)


class Collective(NamedTuple):
    """What a GPU sends to the other GPUs that work on the same stage, along one dimension of parallelism.

    With `routing` a token's copies for experts of one GPU are sent once, and those for one node cross the network once.
    """

    over: Literal["tensor", "context", "experts"]
    bytes: float
    steps: int  # one after the other
    routing: Routing | None = None


@dataclass(frozen=True)
class Work:
    """What F of a piece does on one GPU.

    `matmuls` are those with weights, `scores` the operations of attention's: of one kernel of flash attention, or of
    the two `products` of unfused attention; `scans` are those of a state that passes from token to token. `traffic` are
    the bytes that `passes` kernels such as norms and activation functions read and write, `again` the part of them that
    the backward repeats if they are recomputed.
    """

    matmuls: tuple[Matmul, ...] = ()
    scores: float = 0.0
    scans: float = 0.0
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


@dataclass(frozen=True)
class Saved:
    """A tensor that F saves, in bytes of one GPU.

    `dropped_by` is the least recomputation that computes it again, None if none does. The gradient of a weight needs it
    if `operand`: it stays saved for W.
    """

    name: str
    bytes: float
    dropped_by: Recompute | None = "full"
    operand: bool = False

    def kept(self, recompute: Recompute) -> bool:
        """Whether it stays from F until the backward."""
        return self.dropped_by is None or LEVELS.index(recompute) < LEVELS.index(self.dropped_by)


@dataclass(frozen=True)
class Piece:
    """One piece on one GPU. Sizes in bytes and per micro-batch, weights in numbers of them.

    `gradients` are those of what matmuls put out, which wait for W with the operands. `trained` are the weights that
    are trained, None: all.
    """

    kind: Literal["embedding", "dense", "expert", "prediction", "head"]
    weights: float
    saved: tuple[Saved, ...]
    gradients: float
    work: Work
    expert_weights: float = 0.0
    trained: float | None = None

    def activation_bytes(self, recompute: Recompute) -> float:
        """What stays from F until the backward."""
        return sum(tensor.bytes for tensor in self.saved if tensor.kept(recompute))

    @property
    def saved_for_weight_bytes(self) -> float:
        """What stays from B until W: matmuls' operands, computed again if need be, and their outputs' gradients.

        32·b·s·h of a layer whose MLP has the width 4h (Zero Bubble, Qi et al. 2023, Table 2). Nothing if no weight is
        trained.
        """
        if self.trained == 0:
            return 0.0
        return sum(tensor.bytes for tensor in self.saved if tensor.operand) + self.gradients

    @property
    def is_layer(self) -> bool:
        return self.kind in ("dense", "expert")


@dataclass(frozen=True)
class Share:
    """The part of a transformer's micro-batch that each GPU has."""

    shape: Transformer
    parallelism: Parallelism
    run: Run
    sequence: int

    @property
    def tokens(self) -> float:
        """b·s, of which context parallelism leaves each GPU its share."""
        return self.run.microbatch_size * self.sequence / self.parallelism.cp

    @cached_property
    def message_bytes(self) -> float:
        """2·b·s·h: what passes from stage to stage."""
        return self.tensor_bytes(self.shape.hidden) / self.parallelism.along_sequence

    def tensor_bytes(self, width: float) -> float:
        """Of a tensor that has `width` numbers for each token."""
        return self.run.value_bytes * self.tokens * width

    @cached_property
    def rounded(self) -> float:
        """By how much TransformerEngine's matmuls shorten what they save of their operands."""
        return OPERAND_BYTES[self.run.precision] / self.run.value_bytes if self.run.fused_gradients else 1.0

    def operand(self, name: str, nbytes: float, dropped_by: Recompute | None = "full") -> Saved:
        """A matmul's operand, of so many bytes before it is rounded."""
        return Saved(name, nbytes * self.rounded, dropped_by, operand=True)

    @property
    def mask_bytes(self) -> float:
        """Of the mask of a dropout over the width of the model, if there is any."""
        return MASK * self.message_bytes / self.run.value_bytes if self.shape.dropout else 0.0

    def residual_mask(self) -> list[Saved]:
        """What the dropout before a residual saves, if there is any."""
        return [Saved("dropout mask", self.mask_bytes, "cheap")] if self.shape.dropout else []

    @cached_property
    def reduced(self) -> tuple[Collective, ...]:
        """An all-reduce of a GPU's output over the tensor-parallel ring, in 2(t - 1) steps.

        Patarasuk and Yuan 2009: 2(t - 1)/t of its bytes; with sequence parallelism, an all-gather and a reduce-scatter.
        """
        t, nbytes = self.parallelism.tp, self.tensor_bytes(self.shape.hidden)
        return (Collective("tensor", 2 * (t - 1) / t * nbytes, 2 * (t - 1)),) if t > 1 else ()

    def exchanged(self, nbytes: float) -> tuple[Collective, ...]:
        """Keys and values, which go around the context-parallel ring."""
        further = self.parallelism.cp - 1
        return (Collective("context", further * nbytes, further),) if further else ()
