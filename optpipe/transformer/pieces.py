"""The pieces of a transformer that are never cut: what each computes, saves and holds, on one GPU.

Letters as in the papers: b sequences of s tokens a micro-batch, hidden size h, a heads, t-way tensor parallelism. With
16-bit numbers and an ungated MLP of width 4h a layer saves 34·b·s·h + 5·a·s²·b bytes (Korthikanti et al. 2023, Eq. 1),
20·b·s·h where what is cheap is computed again and scores are never stored (PipeOffload, appendix C).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from optpipe.transformer.records import Parallelism, Recompute, Run, Transformer

LEVELS: tuple[Recompute, ...] = ("none", "selective", "cheap", "full")  # each computes again what those before it do
FP32, MASK, INDEX = 4, 1, 8  # bytes
NORM, RESIDUAL = 2, 3  # tensors of the width of the model that are read and written


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
class Work:
    """What F of a piece does on one GPU: operations of matmuls and of scores, and bytes.

    `traffic` is what norms, activation functions and the like read and write, `again` the part of it that the backward
    repeats if they are recomputed. `over_tensor`, `over_context` and `over_experts` are sent to the other GPUs that
    work on the same stage, along these dimensions of parallelism.
    """

    matmul: float = 0.0
    scores: float = 0.0
    traffic: float = 0.0
    again: float = 0.0
    over_tensor: float = 0.0
    over_context: float = 0.0
    over_experts: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True)
class Piece:
    """One piece on one GPU. Sizes in bytes and per micro-batch, weights in numbers of them.

    `gradients` are those of what matmuls put out, which wait for W with the operands.
    """

    kind: Literal["embedding", "dense", "expert", "head"]
    weights: float
    expert_weights: float
    saved: tuple[Saved, ...]
    gradients: float
    work: Work

    def activation_bytes(self, recompute: Recompute) -> float:
        """What stays from F until the backward."""
        return sum(tensor.bytes for tensor in self.saved if tensor.kept(recompute))

    @property
    def saved_for_weight_bytes(self) -> float:
        """What stays from B until W: matmuls' operands, computed again if need be, and their outputs' gradients.

        32·b·s·h of a layer whose MLP has the width 4h (Zero Bubble, Qi et al. 2023, Table 2).
        """
        return sum(tensor.bytes for tensor in self.saved if tensor.operand) + self.gradients

    @property
    def is_layer(self) -> bool:
        return self.kind in ("dense", "expert")


@dataclass(frozen=True)
class Pieces:
    """All pieces of a transformer as one GPU has them."""

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
        e, n, h = self.run.value_bytes, self.tokens, self.shape.hidden
        return e * n * h / self.parallelism.along_sequence

    @property
    def skipped(self) -> int:
        """By how much a causal kernel divides the scores: flash attention leaves out those of later tokens."""
        return 2 if self.shape.causal and self.run.attention == "flash" else 1

    def all(self) -> list[Piece]:
        """Embedding, layers, head."""
        dense, expert = self.layer(experts=False), self.layer(experts=True) if self.shape.experts else None
        layers = [expert if expert and self.shape.has_experts(i) else dense for i in range(self.shape.layers)]
        return [self.embedding(), *layers, self.head()]

    def embedding(self) -> Piece:
        """The embedding: saves the tokens' numbers and its dropout's mask (Korthikanti et al. 2023, section 4.3)."""
        shape, t = self.shape, self.parallelism.tp
        mask = MASK * self.message_bytes / self.run.value_bytes if shape.dropout else 0.0
        return Piece(
            kind="embedding",
            weights=(shape.vocabulary / t + shape.positions) * shape.hidden,
            expert_weights=0.0,
            saved=(Saved("tokens", INDEX * self.tokens, None, operand=True), Saved("dropout mask", mask, None)),
            gradients=self.message_bytes,
            work=Work(traffic=2 * self.message_bytes, over_tensor=self.reduced),
        )

    def head(self) -> Piece:
        """Norm, projection and cross entropy, which keeps its logits in 32 bits: 4·s·b·h + 4·s·b·v bytes.

        Korthikanti et al. 2023, section 4.3. Of tied matrices this is the copy on the last stage.
        """
        shape, t, e, n = self.shape, self.parallelism.tp, self.run.value_bytes, self.tokens
        logits = n * shape.vocabulary / t
        return Piece(
            kind="head",
            weights=shape.vocabulary / t * shape.hidden + shape.hidden,
            expert_weights=0.0,
            saved=(
                Saved("norm input", self.message_bytes, None),
                Saved("head input", self.message_bytes, None, operand=True),
                Saved("logits", FP32 * logits, None),
            ),
            gradients=e * logits,
            work=Work(
                matmul=2 * logits * shape.hidden,
                traffic=2 * self.message_bytes + (e + 2 * FP32) * logits,
                over_tensor=self.reduced,
            ),
        )

    def layer(self, experts: bool) -> Piece:
        """One transformer layer: attention, and an MLP or experts, each with a norm before it."""
        mlp = self._experts() if experts else self._mlp(self.shape.ffn)
        attention = self._latent_attention() if self.shape.kv_latent else self._attention()
        shape = self.shape
        return Piece(
            kind="expert" if experts else "dense",
            weights=attention.weights + mlp.weights + 2 * shape.hidden,
            expert_weights=mlp.expert_weights,
            saved=(*attention.saved, *mlp.saved),
            gradients=attention.gradients + mlp.gradients,
            work=attention.work + mlp.work,
        )

    def _attention(self) -> Piece:
        """11·b·s·h + 5·a·s²·b and its norm's 2·b·s·h (Korthikanti et al. 2023, section 4.1).

        Keys and values are narrower with grouped queries.
        """
        shape, t, e, n = self.shape, self.parallelism.tp, self.run.value_bytes, self.tokens
        h, q, s, cp = shape.hidden, shape.query_width / t, self.sequence, self.parallelism.cp
        kv = max(shape.key_width / t, shape.query_width / shape.heads)  # at least one group on each GPU
        whole, mask = self.message_bytes, MASK * self.message_bytes / e
        saved = [
            Saved("norm input", whole, None),
            Saved("qkv input", whole, "cheap", operand=True),
            Saved("queries", e * n * q),
            Saved("keys and values", 2 * e * n * kv),
            Saved("projection input", e * n * q, operand=True),
            *self._scores(),
        ]
        traffic = (NORM + RESIDUAL) * whole + self._scores_traffic
        if shape.dropout:
            saved.append(Saved("dropout mask", mask, "cheap"))
        return Piece(
            kind="dense",
            weights=h * (2 * q + 2 * kv),
            expert_weights=0.0,
            saved=tuple(saved),
            gradients=e * n * (q + 2 * kv) + whole,
            work=Work(
                matmul=2 * n * h * (2 * q + 2 * kv),
                scores=4 * n * s * q / self.skipped,
                traffic=traffic,
                again=NORM * whole,
                over_tensor=self.reduced,
                over_context=2 * e * n * kv * (cp - 1),
            ),
        )

    def _latent_attention(self) -> Piece:
        """Multi-head latent attention (DeepSeek-V2, section 2.1), with its norm and those of the latent vectors.

        What goes down to the latent vectors is on every GPU of the tensor-parallel group, and is computed there for its
        part of the sequence (as Megatron-LM has it); what goes up, and the heads, are divided. Each head's key has a
        copy of the one with positions that all heads share.
        """
        shape, t, e, n = self.shape, self.parallelism.tp, self.run.value_bytes, self.tokens
        h, s, cp, whole = shape.hidden, self.sequence, self.parallelism.cp, self.message_bytes
        along = self.parallelism.along_sequence
        scored = shape.heads * ((shape.head_size or 0) + shape.rope_size) / t  # the width of queries, and of keys
        value, kv, q = shape.heads * shape.value_size / t, shape.kv_latent, shape.query_latent
        down = h * (q + kv + shape.rope_size)
        up = (q or h) * scored + kv * (shape.heads * (shape.head_size or 0) / t + value)
        latent = e * n * (q + kv) / along
        return Piece(
            kind="dense",
            weights=down + up + value * h + q + kv,
            expert_weights=0.0,
            saved=(
                Saved("norm input", whole, None),
                Saved("latents' input", whole, "cheap", operand=True),
                Saved("latents", latent),
                Saved("latents behind their norms", latent, "cheap", operand=True),
                Saved("queries", e * n * scored),
                Saved("keys and values", e * n * (scored + value)),
                Saved("projection input", e * n * value, operand=True),
                *self._scores(),
                *([Saved("dropout mask", MASK * whole / e, "cheap")] if shape.dropout else []),
            ),
            gradients=latent + e * n * (2 * scored + value) + whole,
            work=Work(
                matmul=2 * n * (down / along + up + value * h),
                scores=2 * n * s * (scored + value) / self.skipped,
                traffic=(NORM + RESIDUAL) * whole + NORM * latent + self._scores_traffic,
                again=NORM * (whole + latent),
                over_tensor=self.reduced,
                over_context=e * n * (scored + value) * (cp - 1),
            ),
        )

    def _scores(self) -> list[Saved]:
        """What attention saves of its scores: flash attention 4 bytes a row of them (Dao et al. 2022)."""
        shape, t, e = self.shape, self.parallelism.tp, self.run.value_bytes
        if self.run.attention == "flash":
            return [Saved("row sums of scores", FP32 * shape.heads * self.tokens / t)]
        saved = [Saved("softmax of scores", e * self._score_count, "selective")]
        if shape.dropout:
            saved.append(Saved("scores' dropout", (e + MASK) * self._score_count, "selective"))
        return saved

    @property
    def _score_count(self) -> float:
        return self.shape.heads * self.tokens * self.sequence / self.parallelism.tp

    @property
    def _scores_traffic(self) -> float:
        """What a softmax of stored scores reads and writes."""
        return 0.0 if self.run.attention == "flash" else 2 * self.run.value_bytes * self._score_count

    def _mlp(self, width: int) -> Piece:
        """19·b·s·h and its norm's 2·b·s·h, if the width is 4h and there is no gate."""
        shape, t, e, n = self.shape, self.parallelism.tp, self.run.value_bytes, self.tokens
        whole, mask = self.message_bytes, MASK * self.message_bytes / e
        saved = [Saved("norm input", whole), Saved("MLP input", whole, "cheap", operand=True)]
        saved += self._between(width * n / t)
        if shape.dropout:
            saved.append(Saved("dropout mask", mask, "cheap"))
        matrices, middle = shape.up_matrices + 1, e * width * n / t
        return Piece(
            kind="dense",
            weights=shape.hidden * width * matrices / t,
            expert_weights=0.0,
            saved=tuple(saved),
            gradients=shape.up_matrices * middle + whole,
            work=Work(
                matmul=2 * n * shape.hidden * width * matrices / t,
                traffic=(NORM + RESIDUAL) * whole + matrices * middle,
                again=NORM * whole + matrices * middle,
                over_tensor=self.reduced,
            ),
        )

    def _experts(self) -> Piece:
        """Router, experts and the shared expert. Each token is sent to `experts_per_token` experts and back.

        What comes back is weighted by the router and stays saved for the weights' gradients.
        """
        shape, parallelism, e, n = self.shape, self.parallelism, self.run.value_bytes, self.tokens
        h, t, sent = shape.hidden, parallelism.tp, n * shape.experts_per_token * self.run.expert_load
        whole, matrices = self.message_bytes, shape.up_matrices + 1
        middle, shared = shape.expert_ffn * sent / t, shape.shared_ffn * n / t
        router = Saved("router's output", FP32 * n * shape.experts / parallelism.along_sequence)
        saved = [Saved("norm input", whole), Saved("router's input", whole, "cheap", operand=True), router]
        saved += [Saved("experts' input", e * sent * h, operand=True), *self._between(middle + shared)]
        saved.append(Saved("experts' output", e * n * shape.experts_per_token * h / parallelism.along_sequence))
        elsewhere = (parallelism.ep - 1) / parallelism.ep
        return Piece(
            kind="expert",
            weights=h * shape.experts + h * shape.shared_ffn * matrices / t,
            expert_weights=shape.experts / parallelism.ep * h * shape.expert_ffn * matrices / t,
            saved=tuple(saved),
            gradients=e * (shape.up_matrices * (middle + shared) + sent * h) + (whole if shape.shared_ffn else 0.0),
            work=Work(
                matmul=2 * n * h * shape.experts / parallelism.along_sequence + 2 * h * matrices * (middle + shared),
                traffic=(NORM + RESIDUAL) * whole + 4 * e * sent * h + matrices * e * (middle + shared),
                again=NORM * whole + matrices * e * (middle + shared),
                over_tensor=self.reduced,
                over_experts=2 * e * sent * h * elsewhere / t,
            ),
        )

    def _between(self, numbers: float) -> list[Saved]:
        """The activation function's inputs, with a gate two, and its output, which the last matrix takes."""
        size = self.run.value_bytes * numbers
        unfused = [Saved("gate", size, "cheap")] if self.shape.gated and not self.run.fused else []
        return [
            *unfused,
            Saved("activation function's input", self.shape.up_matrices * size),
            Saved("activation function's output", size, "cheap", operand=True),
        ]

    @cached_property
    def reduced(self) -> float:
        """What a GPU sends for an all-reduce of its output over the tensor-parallel ring.

        Patarasuk and Yuan 2009: 2(t - 1)/t of its bytes; with sequence parallelism, an all-gather and a reduce-scatter.
        """
        t = self.parallelism.tp
        return 2 * (t - 1) / t * self.run.value_bytes * self.tokens * self.shape.hidden
