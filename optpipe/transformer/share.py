"""What of a micro-batch one GPU works on: its tokens, its part of a tensor, and what its stage's GPUs exchange.

Letters as in the papers: b sequences of s tokens a micro-batch, hidden size h, a heads, t-way tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe.transformer.work import Collective, Saved

FP32, MASK = 4, 1  # bytes
NORM, RESIDUAL = 2, 3  # tensors of the width of the model that are read and written


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
